"""The `segments` backend: exact tree attention by rectangles, on any device, without a mask of the whole forest.

Runs the calls of a `CallSchedule` and merges each query's partial results by log-sum-exp. Keys and values are never
copied along paths: a shared token's K and V are read in place, and their gradients are summed in place.

    N tokens   H query heads   G key heads   D head size
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from treering.attention.ancestors import Ancestor
from treering.attention.form import Form
from treering.attention.gateway import KeysValues, add_rows
from treering.attention.kernels import Gradients, Kernel, Part, choose_kernel, token_major
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
    kernel: Kernel


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
    for call in run.layout.schedule(run.form.window).within:
        rows = slice(call.query_start, call.query_stop)
        part = _part(call, query, own, None, run)
        out[:, :, rows], lse[:, :, rows] = part.out, part.lse
    for source in _later_sources(own, run):
        for call in source.calls:
            rows = slice(call.query_start, call.query_stop)
            _merge(out[:, :, rows], lse[:, :, rows], _part(call, query, source.keys, source.ancestor, run))
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


def _later_sources(own: KeysValues, run: _SegmentRun) -> Iterator[_Source]:
    """The keys that queries see outside their own block."""
    yield _Source(own, run.layout.schedule(run.form.window).across, None)
    for ancestor in run.layout.ancestors:
        calls = run.layout.ancestor_calls(ancestor, run.form.window)
        yield _Source(ancestor.gateway.read(run.layer), calls, ancestor)


def _part(call: Call, query: Tensor, keys: KeysValues, ancestor: Ancestor | None, run: _SegmentRun) -> Part:
    return run.kernel.forward(
        query[:, :, call.query_start : call.query_stop],
        *_taken(keys, call, run.layout),
        mask=_mask(call, query, ancestor, run.layout),
        causal=call.visibility is Visibility.CAUSAL,
        scale=run.form.scale,
    )


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
    for call in run.layout.schedule(run.form.window).within:
        grads = _part_backward(call, grad_out, query, own, whole, None, run)
        rows = slice(call.query_start, call.query_stop)
        grad_query[:, :, rows], grad_own.key[:, :, rows], grad_own.value[:, :, rows] = grads
    for source in _later_sources(own, run):
        for call in source.calls:
            grads = _part_backward(call, grad_out, query, source.keys, whole, source.ancestor, run)
            grad_query[:, :, call.query_start : call.query_stop] += grads.query
            given, keys = KeysValues(grads.key, grads.value), _rows(call, run.layout)
            if source.ancestor is None:
                add_rows(grad_own, keys, given)
            else:
                source.ancestor.gateway.add_gradient(run.layer, keys, given)
    return grad_query, grad_own


def _part_backward(
    call: Call,
    grad_out: Tensor,
    query: Tensor,
    keys: KeysValues,
    whole: Part,
    ancestor: Ancestor | None,
    run: _SegmentRun,
) -> Gradients:
    rows = slice(call.query_start, call.query_stop)
    return run.kernel.backward(
        grad_out[:, :, rows],
        query[:, :, rows],
        *_taken(keys, call, run.layout),
        Part(whole.out[:, :, rows], whole.lse[:, :, rows]),
        mask=_mask(call, query, ancestor, run.layout),
        causal=call.visibility is Visibility.CAUSAL,
        scale=run.form.scale,
    )


def _mask(call: Call, query: Tensor, ancestor: Ancestor | None, layout: TreeLayout) -> Tensor | None:
    return layout.mask(call, query.dtype, None if ancestor is None else ancestor.sight)


def _rows(call: Call, layout: TreeLayout) -> slice | Tensor:
    """The keys of a call: a range, or int64 indices."""
    keys = layout.keys(call)
    return slice(call.key_start, call.key_stop) if keys is None else keys


def _taken(keys: KeysValues, call: Call, layout: TreeLayout) -> KeysValues:
    rows = _rows(call, layout)
    return KeysValues(*(tensor[:, :, rows] for tensor in keys))
