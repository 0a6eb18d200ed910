"""Measure the tensors that a forward saves for its backward, and keep them in host memory until they are read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from treering.model.families import ModelParts
from treering.model.forward import hidden_states
from treering.tree.forest import Forest

PROBE_TOKENS = (16, 48)
"""Two lengths whose saved bytes tell what a token costs: the difference leaves out what does not grow."""


class _OnHost(NamedTuple):
    tensor: Tensor
    device: torch.device


def saved_bytes(run: Callable[[], object], parts: ModelParts) -> int:
    """Bytes that a forward saves for its backward: storages that are not weights, each counted once.

    Args:
        run: the forward; its result is kept until the count is done, and has no backward.
        parts: of the model, whose weights are left out.
    """
    weights = _weight_storages(parts)
    storages: dict[int, int] = {}
    held: list[Tensor] = []

    # Nothing goes backward, so nothing is packed: a tensor, or one with a graph that is held here, would be held by its
    # own graph, and neither be freed. Compiling this would specialise graphs on addresses.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pack(tensor: Tensor) -> None:
        if _storage(tensor) not in weights:
            storages[_storage(tensor)] = tensor.untyped_storage().nbytes()
            held.append(tensor.detach())

    with saved_tensors_hooks(pack, _unread):
        result = run()
    del result
    return sum(storages.values())


def bytes_per_token(parts: ModelParts) -> float:
    """Bytes that a forward saves for each token, from two short forwards; inside `tree_attention`."""
    few, more = (
        saved_bytes(lambda n=n: hidden_states(parts, Forest.from_sequences([[0] * n])), parts)  # type: ignore[misc]
        for n in PROBE_TOKENS
    )
    return (more - few) / (PROBE_TOKENS[1] - PROBE_TOKENS[0])


@contextmanager
def saved_on_host(parts: ModelParts) -> Iterator[None]:
    """Tensors that are saved inside go to the host; weights stay, since they are on the device anyway.

    Where the model is in host memory already, nothing moves.
    """
    weights = _weight_storages(parts)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pack(tensor: Tensor) -> Tensor | _OnHost:
        if tensor.device.type == "cpu" or _storage(tensor) in weights:
            return tensor
        return _OnHost(_to_host(tensor), tensor.device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def unpack(packed: Tensor | _OnHost) -> Tensor:
        return packed.tensor.to(packed.device, non_blocking=True) if isinstance(packed, _OnHost) else packed

    with saved_tensors_hooks(pack, unpack):
        yield


def _unread(packed: None) -> Tensor:
    raise AssertionError("a forward that is only measured has no backward")


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


def _weight_storages(parts: ModelParts) -> set[int]:
    return {_storage(weight) for module in (parts.decoder, parts.head) for weight in module.parameters()}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
