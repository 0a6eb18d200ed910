"""The `segments` backend: exact tree attention by rectangles, on any device, without a mask of the whole forest.

It runs the calls of a forest and merges each query's partial results by log-sum-exp. Keys and values are never copied
along paths: a shared token's K and V are read in place, and their gradients are summed in place. Two kernels compute
one rectangle with its log-sum-exp, which torch's public function does not return: `FlashCpu` calls torch's CPU flash
attention directly, `Plain` multiplies matrices on any device.

    B = 1 batch   N tokens   H query heads   G key heads (H a multiple of G)   Q queries   K keys   D head size
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from treering.attention.gateway import KeysValues, add_rows
from treering.attention.layout import Ancestor, ScoreOptions, TreeLayout
from treering.attention.rectangles import AttentionCall, Visibility

MAX_SCORE_ENTRIES = 2**22
"""The plain kernel splits query rows so that its score matrix has at most this many entries per head."""


class AttentionOutput(NamedTuple):
    """Softmax-weighted values [B, H, Q, D] and the log-sum-exp [B, H, Q] of their scores."""

    out: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """Gradients of query [B, H, Q, D], key and value [B, G, K, D]."""

    query: Tensor
    key: Tensor
    value: Tensor


class Rectangle(NamedTuple):
    """Queries [B, H, Q, D] against keys and values [B, G, K, D], and which pairs of them are visible."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    """Additive, [Q, K]."""
    causal: bool
    """Whether key i is visible to query j iff i <= j."""
    scale: float


class FlashCpu:
    """Torch's CPU flash attention: float32, float64, bfloat16; grouped heads without copies."""

    def forward(self, given: Rectangle) -> AttentionOutput:
        """Compute the attention of the rectangle."""
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return AttentionOutput(*attention(*given[:3], 0.0, given.causal, attn_mask=given.mask, scale=given.scale))

    def backward(self, given: Rectangle, grad_out: Tensor, whole: AttentionOutput) -> Gradients:
        """Compute gradients through the rectangle, given the *whole* result (all rectangles merged) of its queries."""
        gradient = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return Gradients(
            *gradient(grad_out, *given[:3], *whole, 0.0, given.causal, attn_mask=given.mask, scale=given.scale)
        )


class Plain:
    """Matrix products and a softmax, in slices of query rows; any device and dtype, with or without softcap."""

    def __init__(self, softcap: float | None = None) -> None:
        """`softcap`: scores become `softcap * tanh(scores / softcap)`; None leaves them as they are."""
        self._softcap = softcap

    def forward(self, given: Rectangle) -> AttentionOutput:
        """Compute the attention of the rectangle, one slice of query rows at a time."""
        query, key, value = _widened(given)
        outs, lses = [], []
        for rows in _row_slices(query.shape[2], key.shape[2]):
            scores = _masked(self._capped(query[:, :, rows] @ key.mT * given.scale), rows, given)
            lse = scores.logsumexp(-1)
            outs.append((scores - lse[..., None]).exp() @ value)
            lses.append(lse)
        return AttentionOutput(torch.cat(outs, 2).to(given.query.dtype), torch.cat(lses, 2))

    def backward(self, given: Rectangle, grad_out: Tensor, whole: AttentionOutput) -> Gradients:
        """Recompute the scores of each slice of query rows, and add up the gradients through the rectangle."""
        query, key, value = _widened(given)
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for rows in _row_slices(query.shape[2], key.shape[2]):
            capped = self._capped(query[:, :, rows] @ key.mT * given.scale)
            weights = (_masked(capped, rows, given) - whole.lse[:, :, rows, None]).exp()
            upstream = grad_out[:, :, rows].to(query.dtype)
            delta = (upstream * whole.out[:, :, rows]).sum(-1, keepdim=True)
            grad_scores = weights * (upstream @ value.mT - delta) * given.scale
            if self._softcap is not None:
                grad_scores *= 1.0 - (capped / self._softcap).square()
            grad_query[:, :, rows] = grad_scores @ key
            grad_key += grad_scores.mT @ query[:, :, rows]
            grad_value += weights.mT @ upstream
        per_group = (1, given.key.shape[1], -1, *key.shape[2:])
        folded = (grad.view(per_group).sum(2) for grad in (grad_key, grad_value))
        return Gradients(*(grad.to(given.query.dtype) for grad in (grad_query, *folded)))

    def _capped(self, scores: Tensor) -> Tensor:
        return scores if self._softcap is None else self._softcap * torch.tanh(scores / self._softcap)


def choose_kernel(tensor: Tensor, options: ScoreOptions) -> FlashCpu | Plain:
    """Choose `FlashCpu` for CPU tensors without a softcap (torch's kernel has none), else `Plain`."""
    return FlashCpu() if tensor.device.type == "cpu" and options.softcap is None else Plain(options.softcap)


def token_major(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate [1, heads, N, D] with token-major memory, the order that the projections around attention read."""
    batch, heads, tokens, size = like.shape
    return torch.empty(batch, tokens, heads, size, dtype=dtype, device=like.device).transpose(1, 2)


def _widened(given: Rectangle) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of all query heads, [B, H, L, D], in float32 or wider."""
    wide = torch.promote_types(given.query.dtype, torch.float32)
    groups = given.query.shape[1] // given.key.shape[1]
    key, value = (heads.to(wide).repeat_interleave(groups, 1) for heads in (given.key, given.value))
    return given.query.to(wide), key, value


def _row_slices(num_queries: int, num_keys: int) -> list[slice]:
    rows = max(1, MAX_SCORE_ENTRIES // max(1, num_keys))
    return [slice(start, min(start + rows, num_queries)) for start in range(0, num_queries, rows)]


def _masked(scores: Tensor, rows: slice, given: Rectangle) -> Tensor:
    """Return the scores [B, H, rows, K] with -inf where a key is hidden."""
    if given.mask is not None:
        scores = scores + given.mask[rows].to(scores.dtype)
    if given.causal:
        index = torch.arange(scores.shape[3], device=scores.device)
        later = index[None, :] > torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def segment_attention(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N D"],
    *,
    layout: TreeLayout,
    options: ScoreOptions,
    sinks: Float[Tensor, " H"] | None = None,
    layer: int = 0,
) -> Float[Tensor, "1 H N D"]:
    """Compute attention of every token over its own path; differentiable once, gradients exact.

    Work is one pair per visible pair plus the waste inside masked blocks; memory is O(N). Merging rectangles is exact
    because the backward of each one uses the merged output and log-sum-exp, which give the softmax weights of the whole
    path. Keys of ancestor partitions are more rectangles, read from their gateways. A sink is one more key with its own
    score and no value: it is added to the log-sum-exp after all rectangles.
    """
    run = _SegmentRun(layout, options, layer, choose_kernel(query, options))
    return _SegmentAttention.apply(query, key, value, sinks, run)  # type: ignore[no-any-return, no-untyped-call]


class _SegmentRun(NamedTuple):
    """Arguments of one layer's attention other than tensors."""

    layout: TreeLayout
    options: ScoreOptions
    layer: int
    kernel: FlashCpu | Plain


class _Source(NamedTuple):
    """Keys and values, the calls that read them, and the ancestor that they belong to (None: the forest itself)."""

    keys: KeysValues
    calls: tuple[AttentionCall, ...]
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
        grad_query, grad_own = _attend_backward(
            grad_outputs[0], query, KeysValues(key, value), AttentionOutput(out, lse), run
        )
        below = None if run.layout.gateway is None else run.layout.gateway.take_gradient(run.layer)
        if below is not None:
            grad_own = KeysValues(*(mine + theirs for mine, theirs in zip(grad_own, below, strict=True)))
        grad_sinks = None if sinks is None else _sink_gradient(grad_outputs[0], sinks, out, lse)
        return grad_query.to(query.dtype), grad_own.key.to(key.dtype), grad_own.value.to(value.dtype), grad_sinks, None


def _attend(query: Tensor, own: KeysValues, sinks: Tensor | None, run: _SegmentRun) -> AttentionOutput:
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
    return AttentionOutput(out.to(query.dtype), lse)


def _sink_gradient(grad_out: Tensor, sinks: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return the gradient of the sinks [H]: each is a key with value 0 and gets -weight (grad_out . out) from a row."""
    weight = (sinks.to(lse.dtype)[None, :, None] - lse).exp()
    from_rows = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(weight * from_rows).sum((0, 2)).to(sinks.dtype)


def _sources(own: KeysValues, run: _SegmentRun) -> list[_Source]:
    """Return the keys of each query's own block, then those that queries see outside of it."""
    calls = run.layout.calls(run.options.window)
    above = [
        _Source(ancestor.gateway.read(run.layer), run.layout.ancestor_calls(ancestor, run.options.window), ancestor)
        for ancestor in run.layout.ancestors
    ]
    return [_Source(own, calls.within, None), _Source(own, calls.across, None), *above]


def _rectangle(call: AttentionCall, query: Tensor, source: _Source, run: _SegmentRun) -> Rectangle:
    keys = run.layout.keys(call)
    ranges = None if source.ancestor is None else source.ancestor.ranges
    key, value = (tensor[:, :, keys] for tensor in source.keys)
    mask = run.layout.mask(call, query.dtype, ranges)
    is_causal = call.visibility is Visibility.CAUSAL
    return Rectangle(query[:, :, _rows(call)], key, value, mask, is_causal, run.options.scale)


def _merge(out: Tensor, lse: Tensor, part: AttentionOutput) -> None:
    """Merge a part into a running softmax, in place; the part's share of the weight is sigmoid(lse_part - lse)."""
    share = torch.sigmoid(part.lse - lse)
    out.lerp_(part.out.to(out.dtype), share[..., None])
    torch.logaddexp(lse, part.lse, out=lse)


def _attend_backward(
    grad_out: Tensor, query: Tensor, own: KeysValues, whole: AttentionOutput, run: _SegmentRun
) -> tuple[Tensor, KeysValues]:
    wide = torch.promote_types(query.dtype, torch.float32)
    grad_query = token_major(query, wide)
    grad_own = KeysValues(*(token_major(tensor, wide) for tensor in own))

    def gradients(call: AttentionCall, source: _Source) -> Gradients:
        rows = _rows(call)
        part = AttentionOutput(whole.out[:, :, rows], whole.lse[:, :, rows])
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


def _rows(call: AttentionCall) -> slice:
    return slice(call.query_start, call.query_stop)
