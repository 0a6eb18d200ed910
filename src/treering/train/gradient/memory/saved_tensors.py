"""Measure the tensors that a forward saves for its backward, and keep them in host memory until they are read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from treering.model.families import ModelParts
from treering.model.forward import hidden_states
from treering.model.layers import layers_of
from treering.tree.forest import Forest

PROBE_TOKENS = (16, 48)
"""Two lengths to compare saved bytes at: the difference cancels the constant part."""


class _OnHost(NamedTuple):
    tensor: Tensor
    device: torch.device


def saved_bytes(run: Callable[[], object], parts: ModelParts) -> int:
    """Bytes that a forward saves for its backward: storages that are not weights, each counted once.

    Args:
        run: the forward; its result has no backward.
        parts: of the model; its weights are not counted.
    """
    weights = _weight_storages(parts)
    storages: dict[int, int] = {}
    held: list[Tensor] = []

    # There is no backward, so nothing is packed: a tensor with its graph would be held by that graph and never freed.
    # Compiling this would specialise graphs on addresses.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pack(tensor: Tensor) -> None:
        if _storage(tensor) not in weights:
            storages[_storage(tensor)] = tensor.untyped_storage().nbytes()
            held.append(tensor.detach())

    with saved_tensors_hooks(pack, _unread):
        result = run()
    del result
    return sum(storages.values())


_MEASURED: WeakKeyDictionary[nn.Module, dict[object, float]] = WeakKeyDictionary()


def bytes_per_token(parts: ModelParts) -> float:
    """Bytes that a forward saves per token, from two short forwards; call it inside `tree_attention`.

    Measured once for a model in a state (what is trained, dtypes, mode, checkpointing, attention), and then kept as
    long as the model is.
    """
    known = _MEASURED.setdefault(parts.decoder, {})
    state = _state_of(parts)
    if state not in known:
        known[state] = _measure_bytes_per_token(parts)
    return known[state]


def _state_of(parts: ModelParts) -> object:
    """What decides how much a forward saves."""
    device = parts.device.type
    weights = [(weight.dtype, weight.requires_grad) for weight in parts.decoder.parameters()]
    modules = [(module.training, getattr(module, "gradient_checkpointing", None)) for module in parts.decoder.modules()]
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    how = (cast, parts.config._attn_implementation, layers_of(parts.decoder))
    return device, how, hash(tuple(weights)), hash(tuple(modules))


def _measure_bytes_per_token(parts: ModelParts) -> float:
    few, more = (
        saved_bytes(lambda n=n: hidden_states(parts, Forest.from_sequences([[0] * n])), parts)  # type: ignore[misc]
        for n in PROBE_TOKENS
    )
    return (more - few) / (PROBE_TOKENS[1] - PROBE_TOKENS[0])


@contextmanager
def saved_on_host(parts: ModelParts) -> Iterator[None]:
    """Context manager that moves saved tensors to the host, except weights.

    If the model is on the host, nothing moves.
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
