"""A trained model's weights as a checkpoint that vLLM loads, adapters merged and the head named even where it is tied.

vLLM reads the checkpoint with its own loader, so that the way is the same for an engine in this process and in others.
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from treering.engine.decoder.adapters import WeightSource, bias_of, check_adapter, is_lora, source_of
from treering.errors import UnsupportedError
from treering.model.wrappers import unwrap

Fingerprint: TypeAlias = tuple[tuple[int, int], ...]
"""Two sums of each weight's bits: equal for equal weights, and different with all but certainty for others."""

_MEMORY = Path("/dev/shm")
_MAX_FILE_BYTES = 1 << 30
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def named_weights(model: nn.Module) -> Iterator[tuple[str, WeightSource]]:
    """Each weight by its name in a checkpoint, LoRA to be added; tied weights under each of their names.

    Raises:
        UnsupportedError: an adapter that is no plain LoRA, or experts that Hugging Face holds in one tensor.

    Example: a model with tied embeddings yields "model.embed_tokens.weight" and "lm_head.weight".
    """
    yield from _weights_of(unwrap(model).model, "")


def _weights_of(module: nn.Module, prefix: str) -> Iterator[tuple[str, WeightSource]]:
    if is_lora(module) or hasattr(module, "modules_to_save"):
        check_adapter(module, prefix.rstrip("."))
        yield prefix + "weight", source_of(module)
        bias = bias_of(module) if hasattr(module, "bias") else None
        if bias is not None:
            yield prefix + "bias", WeightSource(bias)
        return
    for name, weight in module.named_parameters(recurse=False):
        if weight.ndim > 2:
            raise UnsupportedError(
                f"vLLM loads the weights of experts one by one, and {prefix}{name} holds many in one tensor; train a "
                "dense model, or sample with TorchEngine"
            )
        yield prefix + name, WeightSource(weight)
    for name, child in module.named_children():
        yield from _weights_of(child, f"{prefix}{name}.")


def fingerprint(model: nn.Module) -> Fingerprint:
    """Identifies the present weights; takes twice the memory of the largest matrix.

    Example: it changes when a single weight does, and when two weights are swapped.
    """
    with torch.no_grad():
        return tuple(_sums(_filled(source)) for _, source in named_weights(model))


@contextmanager
def checkpoint_of(model: nn.Module, *, has_tied_head: bool = True) -> Iterator[Path]:
    """A folder with the model's present weights as safetensors, in memory where there is room; deleted at the end.

    A head that is tied to the embedding is written for an update, which would leave the old one otherwise. It is left
    out for a start: vLLM unties a head that it finds, and holds it twice from then on.

    Example: `with checkpoint_of(model) as folder: llm.collective_rpc("reload_weights", kwargs={"weights_path":
    str(folder)})`.
    """
    with tempfile.TemporaryDirectory(prefix="treering-weights-", dir=_place(model)) as name:
        left_out = None if has_tied_head else _tied_head(model)
        _write(((name, source) for name, source in named_weights(model) if name != left_out), Path(name))
        yield Path(name)


def _tied_head(model: nn.Module) -> str | None:
    """The name of the head if it is the embedding's weight."""
    config: Any = unwrap(model).model.config
    return "lm_head.weight" if config.get_text_config().tie_word_embeddings else None


def _write(weights: Iterable[tuple[str, WeightSource]], folder: Path) -> None:
    """Writes files of about a gigabyte, so that the copy needs little memory of its own."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    num_files = 0
    with torch.no_grad():
        for name, source in weights:
            tensors[name] = _filled(source).cpu()
            if sum(tensor.nbytes for tensor in tensors.values()) >= _MAX_FILE_BYTES:
                save_file(tensors, folder / f"model-{num_files:05}.safetensors")
                tensors, num_files = {}, num_files + 1
    if tensors:
        save_file(tensors, folder / f"model-{num_files:05}.safetensors")


def _filled(source: WeightSource) -> Tensor:
    target = torch.empty_like(source.weight, memory_format=torch.contiguous_format)
    source.fill(target)
    return target


def _place(model: nn.Module) -> Path | None:
    """Shared memory if it has room; None is the system's folder for temporary files."""
    num_bytes = sum(source.weight.nbytes for _, source in named_weights(model))
    has_room = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 2 * num_bytes
    return _MEMORY if has_room else None


def _sums(weight: Tensor) -> tuple[int, int]:
    # Sums of integers wrap around: they lose nothing to rounding, whatever the order.
    bits = weight.reshape(-1).view(_INTEGERS[weight.itemsize])
    places = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
    return int(bits.sum(dtype=torch.int64)), int((bits * places).sum())
