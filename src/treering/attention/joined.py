"""All keys that a forest's queries can see, in one array: those of the partitions above, outermost first, then its own.

For backends that read keys as one array. Copies the ancestors' keys once per layer and call.

    N tokens   K keys, the ancestors' and the N own ones   G key heads   D head size
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treering.attention.gateway import KeysValues
from treering.attention.layout import TreeLayout


def join(own: KeysValues, layout: TreeLayout, layer: int) -> KeysValues:
    """Keys and values [1, G, K, D] of a layer, without gradients for the ancestors' part."""
    return _concatenated([*(ancestor.gateway.read(layer) for ancestor in reversed(layout.ancestors)), own])


def scatter_key_gradients(gradient: KeysValues, layout: TreeLayout, layer: int) -> KeysValues:
    """Adds the ancestors' part of a gradient [1, G, K, D] to their gateways and returns that of the own keys.

    Includes the gradients that partitions below added for the own keys.
    """
    start = 0
    for ancestor in reversed(layout.ancestors):
        stop = start + ancestor.sight.first.size
        part = KeysValues(*(tensor[:, :, start:stop] for tensor in gradient))
        ancestor.gateway.add_gradient(layer, slice(None), part)
        start = stop
    own = KeysValues(*(tensor[:, :, start:] for tensor in gradient))
    below = None if layout.gateway is None else layout.gateway.take_gradient(layer)
    return own if below is None else KeysValues(*(mine + theirs for mine, theirs in zip(own, below, strict=True)))


def join_differentiably(own: KeysValues, layout: TreeLayout, layer: int) -> KeysValues:
    """Keys and values [1, G, K, D] by an autograd function; gradients go where `scatter_key_gradients` puts them.

    Exports the own ones to the layout's gateway, if it has one.
    """
    if layout.gateway is not None:
        layout.gateway.export(layer, own)
    if layout.gateway is None and not layout.ancestors:
        return own
    return KeysValues(*_Join.apply(*own, layout, layer))  # type: ignore[no-untyped-call]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, layout: TreeLayout, layer: int) -> tuple[Tensor, ...]:
        ctx.layout, ctx.layer = layout, layer
        return tuple(tensor.view_as(tensor) for tensor in join(KeysValues(key, value), layout, layer))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own = scatter_key_gradients(KeysValues(*grads), ctx.layout, ctx.layer)
        return (*(mine.to(grad.dtype) for mine, grad in zip(own, grads, strict=True)), None, None)


def _concatenated(parts: Iterable[KeysValues]) -> KeysValues:
    keys, values = zip(*parts, strict=True)
    return KeysValues(*(tensors[0] if len(tensors) == 1 else torch.cat(tensors, 2) for tensors in (keys, values)))
