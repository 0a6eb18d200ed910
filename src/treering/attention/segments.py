"""The `segments` backend: exact tree attention by rectangles, on any device, without a mask of the whole forest.

Runs the calls of a `Schedule` and merges what each query gets from several of them by log-sum-exp. Keys and values are
never copied along paths: a shared token's K and V are read where they stand, and their gradients summed there.

    N tokens   H query heads   G key heads   D head size
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from treering.attention.kernels import Kernel, Part, choose_kernel
from treering.attention.layout import TreeLayout
from treering.attention.schedule import Call, Visibility


def segment_attention(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N D"],
    *,
    layout: TreeLayout,
    scale: float,
    kernel: Kernel | None = None,
) -> Float[Tensor, "1 H N D"]:
    """Attention of every token over its own path; differentiable once, gradients exact.

    Work is one pair per visible pair plus the waste inside masked blocks; memory is O(N). Merging rectangles is exact
    because the backward of each one is given the merged output and log-sum-exp: its softmax weights are then those of
    the whole path.
    """
    return _SegmentAttention.apply(query, key, value, layout, scale, kernel or choose_kernel(query))  # type: ignore[no-any-return, no-untyped-call]


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float, kernel: Kernel
    ) -> Tensor:
        whole = _attend(query, key, value, layout, scale, kernel)
        ctx.save_for_backward(query, key, value, whole.out, whole.lse)
        ctx.layout, ctx.scale, ctx.kernel = layout, scale, kernel
        return whole.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grads = _attend_backward(grad_outputs[0], query, key, value, Part(out, lse), ctx.layout, ctx.scale, ctx.kernel)
        return (*grads, None, None, None)


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float, kernel: Kernel) -> Part:
    wide = torch.promote_types(query.dtype, torch.float32)
    out = _token_major(query, wide)
    lse = torch.empty(query.shape[:3], dtype=wide, device=query.device)
    for call in layout.schedule.within:
        rows = slice(call.query_start, call.query_stop)
        part = _run(kernel, call, query, key, value, layout, scale)
        out[:, :, rows], lse[:, :, rows] = part.out, part.lse
    for call in layout.schedule.across:
        rows = slice(call.query_start, call.query_stop)
        part = _run(kernel, call, query, key, value, layout, scale)
        _merge(out[:, :, rows], lse[:, :, rows], part)
    return Part(out.to(query.dtype), lse)


def _run(
    kernel: Kernel, call: Call, query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float
) -> Part:
    return kernel.forward(
        query[:, :, call.query_start : call.query_stop],
        _take(key, call, layout),
        _take(value, call, layout),
        mask=layout.mask(call, query.dtype),
        causal=call.visibility is Visibility.CAUSAL,
        scale=scale,
    )


def _merge(out: Tensor, lse: Tensor, part: Part) -> None:
    """Adds a part to a running softmax, in place: the new share of the weight is sigmoid(lse_part - lse)."""
    share = torch.sigmoid(part.lse - lse)
    out.lerp_(part.out.to(out.dtype), share[..., None])
    torch.logaddexp(lse, part.lse, out=lse)


def _attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: Part,
    layout: TreeLayout,
    scale: float,
    kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    grad_query, grad_key, grad_value = (_token_major(tensor, wide) for tensor in (query, key, value))
    for call in (*layout.schedule.within, *layout.schedule.across):
        rows = slice(call.query_start, call.query_stop)
        grads = kernel.backward(
            grad_out[:, :, rows],
            query[:, :, rows],
            _take(key, call, layout),
            _take(value, call, layout),
            Part(whole.out[:, :, rows], whole.lse[:, :, rows]),
            mask=layout.mask(call, query.dtype),
            causal=call.visibility is Visibility.CAUSAL,
            scale=scale,
        )
        if call.query_start == call.key_start:
            grad_query[:, :, rows], grad_key[:, :, rows], grad_value[:, :, rows] = grads
            continue
        grad_query[:, :, rows] += grads.query
        _give(grad_key, grads.key, call, layout)
        _give(grad_value, grads.value, call, layout)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _token_major(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised [1, heads, N, D] whose memory runs by token, as the projections around attention read it."""
    batch, heads, tokens, size = like.shape
    return torch.empty(batch, tokens, heads, size, dtype=dtype, device=like.device).transpose(1, 2)


def _take(tensor: Tensor, call: Call, layout: TreeLayout) -> Tensor:
    keys = layout.keys(call)
    return tensor[:, :, call.key_start : call.key_stop] if keys is None else tensor[:, :, keys]


def _give(total: Tensor, grad: Tensor, call: Call, layout: TreeLayout) -> None:
    keys = layout.keys(call)
    if keys is None:
        total[:, :, call.key_start : call.key_stop] += grad
        return
    total.index_add_(2, keys, grad.to(total.dtype))
