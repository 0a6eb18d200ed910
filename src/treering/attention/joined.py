"""All keys that a forest's queries can see, in one array: those of the partitions above, outermost first, then its own.

For backends that read keys as one array. Copies the ancestors' keys once per layer and call.

    N tokens   K keys, the ancestors' and the N own ones   G key heads   D head size
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treering.attention.gateway import Gateway, KeysValues
from treering.attention.layout import TreeLayout
from treering.tree.plan.fragment import Sight


def joined_sight(layout: TreeLayout) -> Sight:
    """Which rows of the forest see each of the K keys, and the keys' positions.

    Example: of the branches 5, 6 and 5, 7, with the 5 in a partition above, rows 0:2 see key 0, rows 0:1 key 1 and rows
    1:2 key 2.
    """
    sights = [*(ancestor.sight for ancestor in reversed(layout.ancestors)), layout.sight]
    return Sight(*(np.concatenate(arrays) for arrays in zip(*sights, strict=True)))


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
    """Keys and values [1, G, K, D] by autograd operations; gradients go where `scatter_key_gradients` puts them.

    Exports the own ones to the layout's gateway, if it has one.
    """
    if layout.gateway is not None:
        layout.gateway.export(layer, own)
        own = _with_gateway_gradients(layout.gateway, layer, *own)
    return _concatenated([*(_received(ancestor.gateway, layer) for ancestor in reversed(layout.ancestors)), own])


def _concatenated(parts: Iterable[KeysValues]) -> KeysValues:
    keys, values = zip(*parts, strict=True)
    return KeysValues(*(tensors[0] if len(tensors) == 1 else torch.cat(tensors, 2) for tensors in (keys, values)))


class _AddGatewayGradients(torch.autograd.Function):
    """Keys and values unchanged; the backward adds the gradients from partitions below."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, gateway: Gateway, layer: int) -> tuple[Tensor, Tensor]:
        ctx.gateway, ctx.layer = gateway, layer
        return key.view_as(key), value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        below = ctx.gateway.take_gradient(ctx.layer)
        if below is not None:
            grads = tuple((grad + more).to(grad.dtype) for grad, more in zip(grads, below, strict=True))
        return (*grads, None, None)


def _with_gateway_gradients(gateway: Gateway, layer: int, key: Tensor, value: Tensor) -> KeysValues:
    return KeysValues(*_AddGatewayGradients.apply(key, value, gateway, layer))  # type: ignore[no-untyped-call]


def _received(gateway: Gateway, layer: int) -> KeysValues:
    """Keys and values of an ancestor; their gradients are added to its gateway."""
    key, value = (tensor.detach().requires_grad_(torch.is_grad_enabled()) for tensor in gateway.read(layer))
    everything = slice(None)
    if key.requires_grad:
        nothing = torch.zeros_like(key)
        key.register_hook(  # type: ignore[no-untyped-call]
            lambda grad: gateway.add_gradient(layer, everything, KeysValues(grad, nothing))
        )
        value.register_hook(  # type: ignore[no-untyped-call]
            lambda grad: gateway.add_gradient(layer, everything, KeysValues(nothing, grad))
        )
    return KeysValues(key, value)
