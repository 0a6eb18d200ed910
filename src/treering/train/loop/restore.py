"""Reads a checkpoint into a loop, whatever number of ranks wrote it; runs no code from it."""

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from treering.errors import StateError
from treering.ranks.state import first_sharded, join_state, own_part, shard_like
from treering.train.loop.adapters import adapter_tensors, has_adapter
from treering.train.loop.resumable import ReportT, Resumable

STATE_FILE = "training_state.pt"
SHARDS_FOLDER = "sharded_state"
"""The parts of the state that ranks wrote by themselves; absent in a checkpoint of one rank."""


def restore(checkpoint: Path, loop: Resumable[ReportT]) -> None:
    """Loads a complete checkpoint into a loop, bitwise; all ranks of a sharded model call it.

    Raises:
        StateError: it is of another model, or holds what cannot be read.
    """
    # Its checksums are right, so whoever wrote the manifest wrote what cannot be read.
    try:
        state = torch.load(checkpoint / STATE_FILE, map_location="cpu", weights_only=True)
        state = join_state(state, checkpoint / SHARDS_FOLDER, first_sharded(loop.model))
        load_weights(loop.model, checkpoint)
        parts = state["loop"], state["random"]
    except (OSError, pickle.UnpicklingError, SafetensorError, RuntimeError, EOFError, LookupError, TypeError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(
            f"a checkpoint holds tensors and plain values, and {checkpoint} holds something else "
            f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]}); nothing of it was run; remove it, "
            "and start again"
        ) from error
    loop.load_state(parts[0])
    set_random_state(parts[1])


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Copies a checkpoint's tensors into the model's, in the same dtypes; tied tensors are stored once.

    Raises:
        StateError: they are not those of the model.
    """
    own = model.state_dict()
    if has_adapter(model):
        own = adapter_tensors(model, own)
    by_name = _by_stored_name(model, own)
    loaded: set[int] = set()
    for name, tensor in _stored_tensors(checkpoint):
        target = by_name.get(name)
        if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
            expected = "nothing" if target is None else f"{target.dtype} {tuple(target.shape)}"
            raise StateError(
                f"{checkpoint} holds {name!r} as {tensor.dtype} {tuple(tensor.shape)}, and the model has {expected} "
                "there; resume with the model that was saved"
            )
        target.copy_(shard_like(tensor, target))
        loaded.add(_place(target))
    missing = [name for name, target in own.items() if _place(target) not in loaded]
    if missing:
        raise StateError(
            f"{checkpoint} has no {missing[0]!r}, which the model has; resume with the model that was saved"
        )


def _by_stored_name(model: Any, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors by the names under which transformers stores them, which differ where it takes pictures."""
    if has_adapter(model) or getattr(getattr(model, "config", None), "vision_config", None) is None:
        return own
    from transformers.core_model_loading import revert_weight_conversion

    # The same tensors under other names; where a conversion made new ones, those of the model would not be loaded.
    stored: dict[str, Tensor] = revert_weight_conversion(model, own)
    return stored


def _place(tensor: Tensor) -> int:
    """What tied tensors share; of a sharded one its own part counts."""
    return own_part(tensor).data_ptr()


def _stored_tensors(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(checkpoint.glob("*.safetensors")):
        yield from load_file(file).items()


def random_state() -> dict[str, Any]:
    """Torch's random state on every device, as tensors."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores a `random_state`; from a machine with more or fewer CUDA devices, those that both have."""
    torch.set_rng_state(state["cpu"])
    for device, of_device in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(of_device, device)
