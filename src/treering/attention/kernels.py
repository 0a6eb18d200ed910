"""Attention of one rectangle with its log-sum-exp, forward and backward, for the `segments` backend.

Two kernels compute the same: `FlashCpu` calls torch's CPU flash attention directly, `Plain` multiplies matrices on any
device. Torch's public function does not return the log-sum-exp, which merging rectangles needs.

    B = 1 batch   H query heads   G key heads (H a multiple of G)   Q queries   K keys   D head size
"""

from typing import NamedTuple

import torch
from torch import Tensor

from treering.attention.form import Form

MAX_SCORE_ENTRIES = 2**22
"""The plain kernel splits query rows so that its score matrix has at most this many entries per head."""


class Part(NamedTuple):
    """Softmax-weighted values [B, H, Q, D] and log-sum-exp [B, H, Q] of the scores that they were weighted with."""

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

    def forward(self, given: Rectangle) -> Part:
        """Attention of the rectangle."""
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return Part(*attention(*given[:3], 0.0, given.causal, attn_mask=given.mask, scale=given.scale))

    def backward(self, given: Rectangle, grad_out: Tensor, whole: Part) -> Gradients:
        """Gradients through the rectangle, given the *whole* result (all rectangles merged) of its queries."""
        gradient = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return Gradients(
            *gradient(grad_out, *given[:3], *whole, 0.0, given.causal, attn_mask=given.mask, scale=given.scale)
        )


class Plain:
    """Matrix products and a softmax, in slices of query rows; any device and dtype, softcap too."""

    def __init__(self, softcap: float | None = None) -> None:
        """`softcap`: scores become `softcap * tanh(scores / softcap)`; None leaves them as they are."""
        self._softcap = softcap

    def forward(self, given: Rectangle) -> Part:
        """See `FlashCpu.forward`."""
        query, key, value = _widened(given)
        outs, lses = [], []
        for rows in _row_slices(query.shape[2], key.shape[2]):
            scores = _masked(self._capped(query[:, :, rows] @ key.mT * given.scale), rows, given)
            lse = scores.logsumexp(-1)
            outs.append((scores - lse[..., None]).exp() @ value)
            lses.append(lse)
        return Part(torch.cat(outs, 2).to(given.query.dtype), torch.cat(lses, 2))

    def backward(self, given: Rectangle, grad_out: Tensor, whole: Part) -> Gradients:
        """See `FlashCpu.backward`."""
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


def choose_kernel(tensor: Tensor, form: Form) -> FlashCpu | Plain:
    """`FlashCpu` for CPU tensors without a softcap (torch's kernel has none), else `Plain`."""
    return FlashCpu() if tensor.device.type == "cpu" and form.softcap is None else Plain(form.softcap)


def token_major(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised [1, heads, N, D] with token-major memory, the layout that the projections around attention read."""
    batch, heads, tokens, size = like.shape
    return torch.empty(batch, tokens, heads, size, dtype=dtype, device=like.device).transpose(1, 2)


def _widened(given: Rectangle) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all query heads [B, H, L, D], in float32 or wider."""
    wide = torch.promote_types(given.query.dtype, torch.float32)
    groups = given.query.shape[1] // given.key.shape[1]
    key, value = (heads.to(wide).repeat_interleave(groups, 1) for heads in (given.key, given.value))
    return given.query.to(wide), key, value


def _row_slices(num_queries: int, num_keys: int) -> list[slice]:
    rows = max(1, MAX_SCORE_ENTRIES // max(1, num_keys))
    return [slice(start, min(start + rows, num_queries)) for start in range(0, num_queries, rows)]


def _masked(scores: Tensor, rows: slice, given: Rectangle) -> Tensor:
    """Scores [B, H, rows, K] with -inf where a key is hidden."""
    if given.mask is not None:
        scores = scores + given.mask[rows].to(scores.dtype)
    if given.causal:
        index = torch.arange(scores.shape[3], device=scores.device)
        later = index[None, :] > torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        scores = scores.masked_fill(later, float("-inf"))
    return scores
