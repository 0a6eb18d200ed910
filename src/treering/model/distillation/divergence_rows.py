"""Divergence of the student from the teacher at hidden rows, through both heads, in bounded memory.

All rows at once or in chunks, as for log-probs. In chunks the teacher's logits are recomputed too, so that no [R, V]
array is ever held.

    R rows   V vocabulary   C hidden size
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from treering.model.distillation.divergence import Divergence, Target, logit_gradient, row_divergence
from treering.model.distillation.teacher import TeacherRows
from treering.model.head.linear import OfLogits, RowChunk, chunks
from treering.model.scoring import by_chunks, max_logit_rows


def divergence_rows(
    rows: Float[Tensor, "R C"],
    head: nn.Module,
    teacher: TeacherRows,
    divergence: Divergence,
    *,
    vocab_size: int,
    softcap: float | None = None,
    logit_divisor: float = 1.0,
) -> Float[Tensor, " R"]:
    """The divergence of each row, float32 or wider; differentiable with respect to the student only.

    Args:
        rows: the student's hidden states.
        head: the student's, hidden state to logits.
        teacher: of the same rows.
        divergence: the kind, and the temperature of both.
        vocab_size: V, which determines the rows per chunk.
        softcap: of the student's logits; None leaves them as they are.
        logit_divisor: number that the student divides its logits by.

    Example: where both models give the same logits, every divergence is 0.
    """
    # Half of what log-probs hold: there are the logits of two heads.
    max_rows = max(1, max_logit_rows(rows.device, vocab_size) // 2)
    pieces = chunks(rows.shape[0], np.empty(0, np.int64), max_rows)
    of_logits = _OfTeacher(teacher, divergence, rows.device.type)
    temperature = divergence.temperature * logit_divisor
    (total,) = by_chunks(rows, head, pieces, of_logits, softcap=softcap, temperature=temperature)
    return total


class _OfTeacher(OfLogits):
    """Divergences from a teacher, from the student's logits of a chunk."""

    def __init__(self, teacher: TeacherRows, divergence: Divergence, device: str) -> None:
        self._teacher, self._divergence, self._device = teacher, divergence, device
        # The teacher's head runs under autocast as it does here: a backward runs outside of it.
        self._dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def on_graph(self, logits: Tensor, chunk: RowChunk) -> tuple[Tensor, ...]:
        target = self._target(chunk, logits)
        return (_LogitDivergence.apply(logits, *target, self._divergence),)  # type: ignore[no-untyped-call]

    def values(self, logits: Tensor, chunk: RowChunk) -> tuple[Tensor, ...]:
        return (row_divergence(logits, self._target(chunk, logits), self._divergence),)

    def gradient(self, logits: Tensor, chunk: RowChunk, grads: Sequence[Tensor | None]) -> Tensor:
        (grad,) = grads
        assert grad is not None, "autograd computes only gradients that something needs"
        return logit_gradient(logits, self._target(chunk, logits), self._divergence, grad[chunk.rows])

    def _target(self, chunk: RowChunk, like: Tensor) -> Target:
        with torch.autocast(self._device, dtype=self._dtype, enabled=self._dtype is not None):
            return self._teacher.target(chunk.rows, self._divergence.temperature, like=like)


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
