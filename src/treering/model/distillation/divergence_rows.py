"""Divergence of the student from the teacher at hidden rows, through both heads, in bounded memory.

As for log-probs: all rows at once, which saves their logits; a linear head in chunks of rows, whose logits are
recomputed in the backward and whose weight gradient is summed in place; any other head in checkpointed chunks. The
teacher's logits are recomputed too, so that no [R, V] array is ever held.

    R rows   V vocabulary   C hidden size
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from treering.model.distillation.divergence import Divergence, Target, logit_gradient, row_divergence
from treering.model.distillation.teacher import TeacherRows
from treering.model.head.linear import BufferedHead, add_product
from treering.model.logits import scaled_logits
from treering.model.scoring import compute_dtype, is_plain_linear, max_logit_rows


def divergence_rows(
    rows: Float[Tensor, "R C"],
    head: nn.Module,
    teacher: TeacherRows,
    divergence: Divergence,
    *,
    vocab_size: int,
    softcap: float | None = None,
) -> Float[Tensor, " R"]:
    """The divergence of each row, float32 or wider; differentiable with respect to the student only.

    Args:
        rows: the student's hidden states.
        head: the student's, hidden state to logits.
        teacher: of the same rows.
        divergence: the kind, and the temperature of both.
        vocab_size: V, which determines the rows per chunk.
        softcap: of the student's logits; None leaves them as they are.

    Example: where both models give the same logits, every divergence is 0.
    """
    # Half of what log-probs hold: there are the logits of two heads.
    max_rows = max(1, max_logit_rows(rows.device, vocab_size) // 2)
    num_rows = rows.shape[0]
    if num_rows <= max_rows:
        return _of_chunk(rows, head, teacher, slice(0, num_rows), divergence, softcap)
    if is_plain_linear(head) and softcap is None:
        dtype = compute_dtype(rows)
        bias: Tensor | None = head.bias
        bias = None if bias is None else bias.to(dtype)
        total: Tensor = _LinearDivergence.apply(  # type: ignore[no-untyped-call]
            rows.to(dtype), head.weight.to(dtype), bias, teacher, divergence, max_rows
        )
        return total
    return torch.cat(
        [
            checkpoint(_of_chunk, rows[at], head, teacher, at, divergence, softcap, use_reentrant=False)
            for at in _chunks(num_rows, max_rows)
        ]
    )


def _chunks(num_rows: int, max_rows: int) -> list[slice]:
    return [slice(start, min(start + max_rows, num_rows)) for start in range(0, num_rows, max_rows)]


def _autocast_of(rows: Tensor) -> tuple[bool, torch.dtype]:
    """Whether the teacher's head runs under autocast here, and in which dtype: a backward runs outside of it."""
    device = rows.device.type
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _of_chunk(
    rows: Tensor, head: nn.Module, teacher: TeacherRows, at: slice, divergence: Divergence, softcap: float | None
) -> Tensor:
    logits = scaled_logits(head, rows, softcap=softcap, temperature=divergence.temperature)
    target = teacher.target(at, divergence.temperature, like=logits)
    total: Tensor = _LogitDivergence.apply(logits, *target, divergence)  # type: ignore[no-untyped-call]
    return total


class _LogitDivergence(torch.autograd.Function):
    """Divergences of scaled logits [R, V]; saves both models' logits instead of the chain of intermediates."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, logprobs: Tensor, ids: Tensor | None, divergence: Divergence) -> Tensor:
        ctx.divergence = divergence
        ctx.save_for_backward(logits, logprobs, ids)
        return row_divergence(logits, Target(logprobs, ids), divergence)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, logprobs, ids = ctx.saved_tensors
        return logit_gradient(logits, Target(logprobs, ids), ctx.divergence, grad), None, None, None


class _LinearDivergence(torch.autograd.Function):
    """Divergences through a linear head in chunks of rows; nothing of size [R, V] or a second [V, C] is ever held."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: TeacherRows,
        divergence: Divergence,
        max_rows: int,
    ) -> Tensor:
        ctx.teacher, ctx.divergence, ctx.max_rows = teacher, divergence, max_rows
        ctx.autocast = _autocast_of(rows)
        ctx.save_for_backward(rows, weight, bias)
        head = BufferedHead(weight, bias, temperature=divergence.temperature, max_rows=max_rows)
        parts = []
        for at in _chunks(rows.shape[0], max_rows):
            logits = head.logits(rows[at])
            target = teacher.target(at, divergence.temperature, like=logits)
            parts.append(row_divergence(logits, target, divergence))
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias = ctx.saved_tensors
        is_autocast, autocast_dtype = ctx.autocast
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        head = BufferedHead(weight, bias, temperature=ctx.divergence.temperature, max_rows=ctx.max_rows)
        grad_rows = torch.empty_like(rows) if needs_rows else None
        grad_weight = torch.zeros(weight.shape, dtype=grad.dtype, device=weight.device) if needs_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=grad.dtype, device=bias.device) if needs_bias else None
        for at in _chunks(rows.shape[0], ctx.max_rows):
            logits = head.logits(rows[at])
            with torch.autocast(rows.device.type, dtype=autocast_dtype, enabled=is_autocast):
                target = ctx.teacher.target(at, ctx.divergence.temperature, like=logits)
            upstream = head.unscaled(logit_gradient(logits, target, ctx.divergence, grad[at]))
            if grad_rows is not None:
                grad_rows[at] = upstream @ weight
            if grad_weight is not None:
                add_product(grad_weight, upstream.mT, rows[at])
            if grad_bias is not None:
                grad_bias += upstream.sum(0)
        in_dtype = [None if total is None else total.to(rows.dtype) for total in (grad_rows, grad_weight, grad_bias)]
        return (*in_dtype, None, None, None)
