"""The specification of tree attention: a dense mask and a softmax. O(N^2) memory; for tests and small forests.

N tokens   H query heads   G key heads   D head size
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from treering.attention.gateway import Gateway, KeysValues
from treering.attention.layout import TreeLayout


def reference_attention(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N D"],
    *,
    layout: TreeLayout,
    scale: float,
    layer: int = 0,
) -> Float[Tensor, "1 H N D"]:
    """Attention of every token over its own path: softmax(scale q k^T over visible keys) v, by autograd.

    Computed in float32 or wider and rounded once, at the end.
    """
    if layout.gateway is not None:
        layout.gateway.export(layer, key, value)
        key, value = _collected(layout.gateway, layer, key, value)
    for ancestor in reversed(layout.ancestors):
        above = _received(ancestor.gateway, layer)
        key, value = torch.cat([above.key, key], 2), torch.cat([above.value, value], 2)
    groups = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, values = (heads.to(wide).repeat_interleave(groups, 1) for heads in (key, value))
    scores = query.to(wide) @ keys.mT * scale
    weights = scores.masked_fill(~layout.visible(), float("-inf")).softmax(-1)
    return (weights @ values).to(query.dtype)


class _Collected(torch.autograd.Function):
    """Keys and values as they are; their gradients plus what partitions below have left."""

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


def _collected(gateway: Gateway, layer: int, key: Tensor, value: Tensor) -> KeysValues:
    return KeysValues(*_Collected.apply(key, value, gateway, layer))  # type: ignore[no-untyped-call]


def _received(gateway: Gateway, layer: int) -> KeysValues:
    """Keys and values of an ancestor, whose gradients go back into its gateway."""
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
