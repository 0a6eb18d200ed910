"""The `segments` backend: exact tree attention by rectangles, on any device, without a mask of the whole forest.

Runs the calls of a `CallSchedule` and merges each query's partial results by log-sum-exp. Keys and values are never
copied along paths: a shared token's K and V are read in place, and their gradients are summed in place.

    N tokens   H query heads   G key heads   D head size
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from treering.attention.ancestors import Ancestor
from treering.attention.form import Form
from treering.attention.gateway import KeysValues, add_rows
from treering.attention.kernels import FlashCpu, Gradients, Part, Plain, Rectangle, choose_kernel, token_major
from treering.attention.layout import TreeLayout
from treering.attention.schedule.call import Call, Visibility


def segment_attention(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N D"],
    *,
    layout: TreeLayout,
    form: Form,
    sinks: Float[Tensor, " H"] | None = None,
    layer: int = 0,
) -> Float[Tensor, "1 H N D"]:
    """Attention of every token over its own path; differentiable once, gradients exact.

    Work is one pair per visible pair plus the waste inside masked blocks; memory is O(N). Merging rectangles is exact
    because the backward of each one uses the merged output and log-sum-exp, which give the softmax weights of the whole
    path. Keys of ancestor partitions are more rectangles, read from their gateways. A sink is one more key with its own
    score and no value: it is added to the log-sum-exp after all rectangles.
    """
    run = _SegmentRun(layout, form, layer, choose_kernel(query, form))
    return _SegmentAttention.apply(query, key, value, sinks, run)  # type: ignore[no-any-return, no-untyped-call]


class _SegmentRun(NamedTuple):
    """Arguments of one layer's attention other than tensors."""

    layout: TreeLayout
    form: Form
    layer: int
    kernel: FlashCpu | Plain


class _Source(NamedTuple):
    """Keys and values, the calls that read them, and the ancestor that they belong to (None: the forest itself)."""

    keys: KeysValues
    calls: tuple[Call, ...]
    ancestor: Ancestor | None


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, run: _SegmentRun) -> Tensor:
        own = KeysValues(key, value)
        if run.layout.gateway is not None:
            run.layout.gateway.export(run.layer, own)
        whole = _attend(query, own, sinks, run)
        ctx.save_for_backward(query, key, value, sinks, whole.out, whole.lse)
        ctx.run = run
        return whole.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        run: _SegmentRun = ctx.run
        grad_query, grad_own = _attend_backward(grad_outputs[0], query, KeysValues(key, value), Part(out, lse), run)
        below = None if run.layout.gateway is None else run.layout.gateway.take_gradient(run.layer)
        if below is not None:
            grad_own = KeysValues(*(mine + theirs for mine, theirs in zip(grad_own, below, strict=True)))
        grad_sinks = None if sinks is None else _sink_gradient(grad_outputs[0], sinks, out, lse)
        return grad_query.to(query.dtype), grad_own.key.to(key.dtype), grad_own.value.to(value.dtype), grad_sinks, None


def _attend(query: Tensor, own: KeysValues, sinks: Tensor | None, run: _SegmentRun) -> Part:
    wide = torch.promote_types(query.dtype, torch.float32)
    out = token_major(query, wide)
    lse = torch.empty(query.shape[:3], dtype=wide, device=query.device)
    block, *later = _sources(own, run)
    for call in block.calls:
        part = run.kernel.forward(_rectangle(call, query, block, run))
        out[:, :, _rows(call)], lse[:, :, _rows(call)] = part
    for source in later:
        for call in source.calls:
            part = run.kernel.forward(_rectangle(call, query, source, run))
            _merge(out[:, :, _rows(call)], lse[:, :, _rows(call)], part)
    if sinks is not None:
        whole = torch.logaddexp(lse, sinks.to(wide)[None, :, None])
        out.mul_((lse - whole).exp_()[..., None])
        lse = whole
    return Part(out.to(query.dtype), lse)


def _sink_gradient(grad_out: Tensor, sinks: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Gradient of the sinks [H]: as a key with value 0, a sink of weight p gets -p (grad_out . out) from each row."""
    weight = (sinks.to(lse.dtype)[None, :, None] - lse).exp()
    from_rows = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(weight * from_rows).sum((0, 2)).to(sinks.dtype)


def _sources(own: KeysValues, run: _SegmentRun) -> list[_Source]:
    """The keys of each query's own block, then those that queries see outside of it."""
    calls = run.layout.schedule(run.form.window)
    above = [
        _Source(ancestor.gateway.read(run.layer), run.layout.ancestor_calls(ancestor, run.form.window), ancestor)
        for ancestor in run.layout.ancestors
    ]
    return [_Source(own, calls.within, None), _Source(own, calls.across, None), *above]


def _rectangle(call: Call, query: Tensor, source: _Source, run: _SegmentRun) -> Rectangle:
    keys = run.layout.keys(call)
    sight = None if source.ancestor is None else source.ancestor.sight
    key, value = (tensor[:, :, keys] for tensor in source.keys)
    mask = run.layout.mask(call, query.dtype, sight)
    is_causal = call.visibility is Visibility.CAUSAL
    return Rectangle(query[:, :, _rows(call)], key, value, mask, is_causal, run.form.scale)


def _merge(out: Tensor, lse: Tensor, part: Part) -> None:
    """Merges a part into a running softmax, in place; the part's share of the weight is sigmoid(lse_part - lse)."""
    share = torch.sigmoid(part.lse - lse)
    out.lerp_(part.out.to(out.dtype), share[..., None])
    torch.logaddexp(lse, part.lse, out=lse)


def _attend_backward(
    grad_out: Tensor, query: Tensor, own: KeysValues, whole: Part, run: _SegmentRun
) -> tuple[Tensor, KeysValues]:
    wide = torch.promote_types(query.dtype, torch.float32)
    grad_query = token_major(query, wide)
    grad_own = KeysValues(*(token_major(tensor, wide) for tensor in own))

    def gradients(call: Call, source: _Source) -> Gradients:
        rows = _rows(call)
        part = Part(whole.out[:, :, rows], whole.lse[:, :, rows])
        return run.kernel.backward(_rectangle(call, query, source, run), grad_out[:, :, rows], part)

    block, *later = _sources(own, run)
    for call in block.calls:
        rows = _rows(call)
        grad_query[:, :, rows], grad_own.key[:, :, rows], grad_own.value[:, :, rows] = gradients(call, block)
    for source in later:
        for call in source.calls:
            grads = gradients(call, source)
            grad_query[:, :, _rows(call)] += grads.query
            given, keys = KeysValues(grads.key, grads.value), run.layout.keys(call)
            if source.ancestor is None:
                add_rows(grad_own, keys, given)
            else:
                source.ancestor.gateway.add_gradient(run.layer, keys, given)
    return grad_query, grad_own


def _rows(call: Call) -> slice:
    return slice(call.query_start, call.query_stop)
