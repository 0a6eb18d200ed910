"""Forward and backward of flash-attn-4 as torch operations, which compiled layers hold without a break.

N query rows   K keys   H query heads   G key heads   D head size
"""

from typing import Any

import torch
from torch import Tensor

_OPTIONS = "Tensor[] ranges, Tensor[] by_query, Tensor[] by_key, int[] block_size, float scale, float softcap"


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    from treering.attention.flash.kernel import run_forward

    return run_forward(*inputs)


def _backward(*inputs: Any) -> list[Tensor]:
    from treering.attention.flash.kernel import run_backward

    # Compiled code relies on the strides that the fake announces, and the package takes over those of the inputs.
    return [gradient.contiguous() for gradient in run_backward(*inputs)]


flash_forward = torch.library.custom_op(
    "treering::flash_forward",
    _forward,
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor? sinks, {_OPTIONS}) -> (Tensor, Tensor)",
)
"""Output [1, N, H, D] and log-sum-exp [1, H, N] of queries [1, N, H, D], keys and values [1, K, G, D] and sinks [H].

Differentiable in these four. `ranges`, the lists and the block size are those of `FlashTables`; a softcap of 0 is none.
"""

flash_backward = torch.library.custom_op(
    "treering::flash_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? sinks, "
    f"{_OPTIONS}) -> Tensor[]",
)
"""Gradients of the queries, keys, values and, if there are any, sinks of `flash_forward`."""


@flash_forward.register_fake
def _fake_forward(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    batch, rows, heads, _ = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty(batch, heads, rows, dtype=torch.float32)


@flash_backward.register_fake
def _fake_backward(grad_out: Tensor, *inputs: Any) -> list[Tensor]:
    query, key, value, _, _, sinks, *_ = inputs
    likes = [query, key, value] if sinks is None else [query, key, value, sinks]
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in likes]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, ranges, by_query, by_key, *ctx.numbers = inputs
    ctx.counts = (len(ranges), len(by_query), len(by_key))
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output, sinks, *ranges, *by_query, *by_key)


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    *tensors, sinks = ctx.saved_tensors[:6]
    rest, lists = list(ctx.saved_tensors[6:]), []
    for count in ctx.counts:
        lists.append(rest[:count])
        rest = rest[count:]
    gradients = flash_backward(grad_out.contiguous(), *tensors, sinks, *lists, *ctx.numbers)
    grad_sinks = None if sinks is None else gradients[3]
    nothing = [[None] * count for count in ctx.counts]
    return (*gradients[:3], grad_sinks, *nothing, None, None, None)


flash_forward.register_autograd(_differentiate, setup_context=_save)
