"""Bring a run's weights from the trainer to the rollout workers: bytes by name, in the latest versions."""

import warnings
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from treering.errors import StateError
from treering.runtime.process import Actors
from treering.train.loop.lora_adapters import adapter_tensors, has_adapter

Weights: TypeAlias = Mapping[str, NDArray[np.uint8]]
"""Bytes of a model's tensors by name, tied ones once; numpy lacks bfloat16 and other types of torch."""


def model_tensors(model: nn.Module, whole: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the model's tensors by name: the first of tied ones, and only the adapters of a model that has them.

    `whole` has the tensors of a sharded model, as `whole_state_dict` gathers them.
    """
    seen: set[int] = set()
    found = {}
    weights = model.state_dict() if whole is None else whole
    for name, tensor in (adapter_tensors(model, weights) if has_adapter(model) else weights).items():
        if tensor.numel() == 0 or tensor.data_ptr() not in seen:
            found[name] = tensor
            seen.add(tensor.data_ptr())
    return found


def weights_of(tensors: Mapping[str, Tensor]) -> Weights:
    """Return the bytes of tensors; for a tensor in this machine's memory, a view of it."""
    return {
        name: tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        for name, tensor in tensors.items()
    }


def tensors_of(weights: Weights, model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model with these weights, as views of the bytes.

    Raises:
        StateError: if the weights belong to another model.
    """
    likes = model_tensors(model)
    found = {name: values.nbytes for name, values in weights.items()}
    needed = {name: like.numel() * like.element_size() for name, like in likes.items()}
    if found != needed:
        raise StateError(
            f"all processes of a run must build the same model, but this one needs {sum(needed.values()):,} bytes in "
            f"{len(needed)} tensors and the run has {sum(found.values()):,} in {len(found)}; make the "
            "recipe's model depend only on the recipe"
        )
    with warnings.catch_warnings():
        # Ray's arrays are read-only, and torch warns about each.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {
            name: torch.from_numpy(weights[name]).view(like.dtype).view(like.shape)
            if like.numel()
            else torch.empty_like(like, device="cpu")
            for name, like in likes.items()
        }


def load_weights(weights: Weights, model: nn.Module) -> None:
    """Copy weights into a model.

    Raises:
        StateError: as in `tensors_of`.
    """
    own = model_tensors(model)
    with torch.no_grad():
        for name, tensor in tensors_of(weights, model).items():
            own[name].copy_(tensor)


class WeightStore:
    """Latest versions of a run's weights, as references that its processes are sent.

    Example: with 3 slots, after versions 0 to 4 were kept, 2, 3 and 4 can be read, and 1 raises StateError.
    """

    def __init__(self, actors: Actors, num_slots: int) -> None:
        """Start empty, with room for `num_slots` versions."""
        self.num_slots = num_slots
        self._actors = actors
        self._refs: dict[int, Any] = {}

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> Any:
        """Keep a model's tensors by name as a version; return the reference."""
        ref = self._actors.put(weights_of(tensors))
        self.keep(version, ref)
        return ref

    def keep(self, version: int, ref: Any) -> None:
        """Keep weights that a trainer has published, and drop versions that no worker needs."""
        self._refs[version] = ref
        self._refs = {known: each for known, each in self._refs.items() if known > version - self.num_slots}

    def ref(self, version: int) -> Any:
        """Return the reference to a version.

        Raises:
            StateError: if the store does not have it.
        """
        if version not in self._refs:
            raise StateError(
                f"the weights of version {version} are needed, but the store has {sorted(self._refs)}; start again "
                "from the last checkpoint"
            )
        return self._refs[version]

    def read(self, version: int, model: nn.Module) -> None:
        """Copy a version into a model."""
        load_weights(self._actors.get(self.ref(version)), model)

    def tensors(self, version: int, model: nn.Module) -> dict[str, Tensor]:
        """Return copies of a version's tensors by name; `model` gives their types and shapes."""
        return {name: tensor.clone() for name, tensor in tensors_of(self._actors.get(self.ref(version)), model).items()}
