"""Triton kernels for a linear head: statistics of a row of logits, and the gradient in place of the logits.

Each kernel reads or writes the logits once, in the dtype of their product; sums are float32. Triton compiles them, or
its interpreter runs them on CPU. Importing this module imports triton.

    R rows   E scored tokens (each names its row, ascending)   V vocabulary
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels run in triton's interpreter."""

BLOCK = 256 if INTERPRETED else 8192
"""Number of logits that a program reads at a time."""

HIDDEN = tl.constexpr(-1e30)
"""Replacement for -inf, which times 0 would be NaN. Its weight is 0 next to any other logit."""

_WARPS = 16


@triton.jit
@no_type_check
def _bounded(x):
    # A maximum that drops NaN would turn it into a finite score.
    return tl.maximum(x, HIDDEN, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize_on_alignment=["lse", "entropy"])
@no_type_check
def _statistics_kernel(
    logits, lse, entropy, stride, num_tokens, scale, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    top = HIDDEN
    total = 0.0
    # Sum of weight times (logit - top).
    mean = 0.0
    for start in range(0, num_tokens, BLOCK):
        inside = start + columns < num_tokens
        x = tl.load(logits + row * stride + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        # A masked token has weight 0, and 0 times its logit must count as 0.
        x = _bounded(x * scale)
        higher = tl.maximum(top, tl.max(x, 0))
        weights = tl.exp(x - higher)
        kept = tl.exp(top - higher)
        if WITH_ENTROPY:
            mean = (mean + total * (top - higher)) * kept + tl.sum(weights * (x - higher), 0)
        total = total * kept + tl.sum(weights, 0)
        top = higher
    # If all tokens are masked there is no distribution.
    total = tl.where(top > HIDDEN, total, float("nan"))
    tl.store(lse + row, top + tl.log(total))
    tl.store(entropy + row, tl.log(total) - mean / total if WITH_ENTROPY else 0.0)


@triton.jit(do_not_specialize_on_alignment=["lse", "entropy", "of_logprobs", "of_entropy"])
@no_type_check
def _gradient_kernel(
    logits, lse, entropy, of_logprobs, of_entropy, stride, num_tokens, scale,
    WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    own_lse, upstream = tl.load(lse + row), tl.load(of_logprobs + row)
    if WITH_ENTROPY:
        own_entropy, turned = tl.load(entropy + row), tl.load(of_entropy + row)
    for start in range(0, num_tokens, BLOCK):
        inside = start + columns < num_tokens
        cells = logits + row * stride + start + columns
        x = tl.load(cells, mask=inside, other=float("-inf")).to(tl.float32)
        logprob = _bounded(x * scale) - own_lse
        factor = -upstream
        if WITH_ENTROPY:
            factor = factor - turned * (logprob + own_entropy)
        gradient = tl.exp(logprob) * factor * scale
        tl.store(cells, gradient.to(logits.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize_on_alignment=[
        *("logprobs", "entropy", "of_logprobs", "of_entropy"),
        *("targets", "target_row", "first", "grads"),
    ]
)
@no_type_check
def _target_kernel(
    logits, logprobs, entropy, of_logprobs, of_entropy, targets, target_row, first, grads, stride, scale,
    WITH_ENTROPY: tl.constexpr,
):  # fmt: skip
    edge = tl.program_id(0).to(tl.int64)
    row, target = tl.load(target_row + edge), tl.load(targets + edge)
    logprob = _bounded(tl.load(logprobs + edge))
    factor = -tl.load(of_logprobs + row)
    if WITH_ENTROPY:
        factor = factor - tl.load(of_entropy + row) * (logprob + tl.load(entropy + row))
    gradient = tl.exp(logprob) * factor
    # Add before rounding: for a near-certain token the two parts nearly cancel. A row may score a token twice.
    for other in range(tl.load(first + row), tl.load(first + row + 1)):
        gradient += tl.where(tl.load(targets + other) == target, tl.load(grads + other), 0.0)
    tl.store(logits + row * stride + target, (gradient * scale).to(logits.dtype.element_ty))


def row_statistics(logits: Tensor, *, scale: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp and entropy of logits [R, V] times a scale, float32 [R] each; zeros without entropies.

    Both are NaN, as in torch's log_softmax, for a row with a NaN or +inf or with only -inf: it has no distribution.

    Example: for logits [0, 0] both the log-sum-exp and the entropy are 0.693.
    """
    lse, entropy = torch.empty(2, logits.shape[0], dtype=torch.float32, device=logits.device)
    _statistics_kernel[(logits.shape[0],)](
        logits, lse, entropy, logits.stride(0), logits.shape[1], scale,
        WITH_ENTROPY=with_entropy, BLOCK=BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return lse, entropy


def write_gradient(
    logits: Tensor,
    lse: Tensor,
    entropy: Tensor,
    targets: Tensor,
    target_row: Tensor,
    logprobs: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    *,
    scale: float,
) -> None:
    """Overwrite the logits [R, V] with their gradient, before the scale.

    Args:
        logits: overwritten.
        lse: float32 [R], from `row_statistics`.
        entropy: float32 [R], from `row_statistics`.
        targets: int64 [E].
        target_row: int64 [E], ascending.
        logprobs: float32 [E], log-probs of the targets.
        grad_logprobs: [E]; None for no gradient.
        grad_entropy: [E], gradient of the entropy of each target's row; None for no gradient.
        scale: factor of the logits, 1 / temperature.
    """
    zeros = torch.zeros_like(lse)
    none = torch.zeros_like(logprobs)
    grads = none if grad_logprobs is None else grad_logprobs.to(torch.float32).contiguous()
    of_logprobs = zeros.index_add(0, target_row, grads)
    of_entropy = zeros if grad_entropy is None else zeros.index_add(0, target_row, grad_entropy.to(torch.float32))
    options = {"WITH_ENTROPY": grad_entropy is not None}
    _gradient_kernel[(logits.shape[0],)](
        logits, lse, entropy, of_logprobs, of_entropy, logits.stride(0), logits.shape[1], scale,
        BLOCK=BLOCK, num_warps=_WARPS, **options,
    )  # fmt: skip
    if targets.numel() == 0:
        return
    first = torch.searchsorted(target_row, torch.arange(logits.shape[0] + 1, device=logits.device))
    _target_kernel[(targets.numel(),)](
        logits, logprobs, entropy, of_logprobs, of_entropy, targets, target_row, first, grads, logits.stride(0),
        scale, **options,
    )  # fmt: skip
