"""Weights and state of a sharded model: gathered for an export, or saved in shards that any number of ranks can read.

The shards are torch's distributed checkpoints (DCP): each rank writes its own part, and a reader asks for the part that
it holds, which may be all or a different part.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treering.errors import StateError
from treering.ranks.group import is_running

_MARK = "_sharded"


def whole_state_dict(model: nn.Module, *, trained_only: bool = False) -> dict[str, Tensor]:
    """Return a sharded model's state dict with whole tensors in host memory, tied ones once; all ranks must call it.

    Tensors are gathered one at a time, and only rank 0 keeps them; the others get an empty dict. `trained_only` drops
    the weights that an update does not change, such as those under adapters.
    """
    is_first = torch.distributed.get_rank() == 0
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    sharded = {name: weight for name, weight in model.named_parameters() if weight.requires_grad or not trained_only}
    gathered: dict[str, Tensor] = {}
    for weight in sharded.values():
        whole = as_whole(weight.detach()).cpu()
        if is_first:
            gathered |= dict.fromkeys(names[id(weight)], whole)
    if not is_first:
        return {}
    own = {name: gathered.get(name, tensor) for name, tensor in model.state_dict().items()}
    return {name: tensor for name, tensor in own.items() if not is_sharded(tensor)}


def whole_state(state: Any) -> Any:
    """Return a state of dicts and lists with its sharded tensors gathered in host memory; all ranks must call it.

    Tensors are gathered one at a time, and only rank 0 keeps them; the others get None in their place.
    """
    is_first = torch.distributed.get_rank() == 0

    def gathered(tensor: Tensor) -> Tensor | None:
        whole = as_whole(tensor).cpu()
        return whole if is_first else None

    return _with_shards_as(gathered, state)


def as_whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor gathered, or any other unchanged."""
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded(tensor) else tensor


@torch.no_grad()
def copy_weights(model: nn.Module, target: nn.Module, *, trained_only: bool = False) -> None:
    """Copy the weights and buffers of a model into a whole one with the same names and shapes; all ranks must call it.

    Sharded weights are gathered one at a time.

    Args:
        model: sharded or whole.
        target: whole on every rank.
        trained_only: skip the weights that an update of the model does not change.

    Example: `copy_weights(sharded, whole, trained_only=True)` after an update, so that `whole` can sample with it.
    """
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad or not trained_only}
    own = {**weights, **dict(model.named_buffers())}
    for name, tensor in [*target.named_parameters(), *target.named_buffers()]:
        if name in own:
            tensor.copy_(as_whole(own[name]))


def own_part(tensor: Tensor) -> Tensor:
    """Return the part of a sharded tensor that this rank holds, or any other tensor unchanged."""
    sharded: Any = tensor
    return sharded.to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is sharded over ranks."""
    if not is_running():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def shard_like(tensor: Any, like: Tensor) -> Any:
    """Return this rank's part of a whole tensor, equal on all ranks, if sharded like another; without communication.

    It stays whole if `like` is whole or has another shape, such as a step count stored with a weight.
    """
    is_whole = isinstance(tensor, Tensor) and not is_sharded(tensor)
    if not is_whole or not is_sharded(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    target: Any = like
    placed = tensor.to(target.to_local().device)
    return distribute_tensor(placed, target.device_mesh, target.placements, src_data_rank=None)


def split_state(state: Any, shards: dict[str, Tensor]) -> Any:
    """Return a state of dicts and lists with its sharded tensors moved to `shards`, and descriptions in their place."""

    def moved(tensor: Tensor) -> dict[str, Any]:
        key = str(len(shards))
        shards[key] = tensor
        return {_MARK: key, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}

    return _with_shards_as(moved, state)


def _with_shards_as(change: Callable[[Tensor], Any], state: Any) -> Any:
    """Return a state of dicts and lists with each sharded tensor replaced by `change` of it."""
    if is_sharded(state):
        return change(state)
    if isinstance(state, Mapping):
        return {key: _with_shards_as(change, value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_with_shards_as(change, value) for value in state)
    return state


def write_shards(shards: Mapping[str, Tensor], folder: Path) -> None:
    """Write sharded tensors into a folder that all ranks can access, each rank its own part; all ranks must call it.

    Raises:
        StateError: on every rank, if one could not write.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(dict(shards), checkpoint_id=folder)
    except CheckpointException as error:
        raise StateError(f"the shards of a checkpoint cannot be written to {folder}: {_first(error)}") from error


def join_state(state: Any, folder: Path, like: Tensor | None) -> Any:
    """Return a `split_state` with its tensors read from a folder, whole or sharded as `like`; all ranks must call it.

    Raises:
        StateError: the folder lacks a tensor, or cannot be read.
    """
    shards: dict[str, Tensor] = {}
    state = _with_space(state, shards, like)
    if not shards:
        return state
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(shards, checkpoint_id=folder, no_dist=not is_running())
    except (CheckpointException, OSError) as error:
        raise StateError(f"the shards of a checkpoint in {folder} cannot be read: {_first(error)}") from error
    return state


def _with_space(state: Any, shards: dict[str, Tensor], like: Tensor | None) -> Any:
    if isinstance(state, Mapping) and _MARK in state:
        shards[state[_MARK]] = _empty(state["shape"], getattr(torch, state["dtype"]), like)
        return shards[state[_MARK]]
    if isinstance(state, Mapping):
        return {key: _with_space(value, shards, like) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_with_space(value, shards, like) for value in state)
    return state


def _empty(shape: list[int], dtype: torch.dtype, like: Tensor | None) -> Tensor:
    if like is None:
        return torch.empty(shape, dtype=dtype)
    from torch.distributed import tensor as sharded

    target: Any = like
    return sharded.zeros(*shape, dtype=dtype, device_mesh=target.device_mesh, placements=target.placements)


def _first(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def first_sharded(model: nn.Module) -> Tensor | None:
    """Return any sharded weight of a model; all of them are sharded alike."""
    return next((weight for weight in model.parameters() if is_sharded(weight)), None)
