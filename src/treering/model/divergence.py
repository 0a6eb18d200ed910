"""Divergence of the student from a teacher at hidden rows, through both heads, in bounded memory.

p is the teacher's distribution and q the student's. The generalised Jensen-Shannon divergence is equation 1 of GKD
(arXiv 2306.13649), with the mixture m = beta p + (1 - beta) q, as in TRL's DistillationTrainer. All rows are computed
at once or in chunks, as for log-probs. Chunks also recompute the teacher's logits, so no [R, V] array is ever held.

    R rows   M outcomes: the vocabulary, or k tokens and one bucket for all others   V vocabulary   C hidden size
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from treering.model.edges import by_chunks, max_logit_rows
from treering.model.logits import OfLogits, RowChunk, chunks

if TYPE_CHECKING:
    from treering.model.teacher import TeacherRows

DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd"]
"""forward_kl: KL(p, q). reverse_kl: KL(q, p). jsd: beta KL(p, m) + (1 - beta) KL(q, m)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Kind of divergence, with its mixture weight and temperature.

    Attributes:
        kind: see `DivergenceKind`.
        beta: the teacher's weight in the mixture of "jsd", between 0 and 1; ignored by the other kinds.
        temperature: divides the logits of both models.
    """

    kind: DivergenceKind
    beta: float = 0.5
    temperature: float = 1.0

    def of(self, student: Float[Tensor, "R M"], teacher: Float[Tensor, "R M"]) -> Float[Tensor, " R"]:
        """Return the divergence of each row in nats, from normalised log-probs.

        Example: p = (1/2, 1/2) and q = (1/4, 3/4) have a forward KL of ln(2) / 2 + ln(2/3) / 2 = 0.144.
        """
        if self.kind == "forward_kl":
            return _kl(teacher, student)
        if self.kind == "reverse_kl":
            return _kl(student, teacher)
        mixture = self._mixture(student, teacher)
        return self.beta * _kl(teacher, mixture) + (1 - self.beta) * _kl(student, mixture)

    def gradient(self, student: Float[Tensor, "R M"], teacher: Float[Tensor, "R M"]) -> Float[Tensor, "R M"]:
        """Return the gradient of each row's divergence with respect to the student's logits.

        With D(a, b) = KL(a, b) it is q - p, q (log q - log p - D(q, p)), or (1 - beta) q (log q - log m - D(q, m)).

        Example: the forward KL of p = (1/2, 1/2) and q = (1/4, 3/4) has the gradient (-1/4, 1/4).
        """
        if self.kind == "forward_kl":
            return student.exp() - teacher.exp()
        other, factor = teacher, 1.0
        if self.kind == "jsd":
            other, factor = self._mixture(student, teacher), 1 - self.beta
        log_ratio = _log_ratio(student, other)
        weights = student.exp()
        mean = (weights * log_ratio).sum(-1, keepdim=True)
        return log_ratio.sub_(mean).mul_(weights).mul_(factor)

    def _mixture(self, student: Tensor, teacher: Tensor) -> Tensor:
        return torch.logaddexp(student + math.log1p(-self.beta), teacher + math.log(self.beta))


class Target(NamedTuple):
    """Teacher distributions of some rows: over the vocabulary, or over k tokens and all others as one outcome."""

    logprobs: Float[Tensor, "R M"]
    """Normalised; M = V without ids, else k + 1, with the bucket of all other tokens last."""
    ids: Int[Tensor, "R k"] | None = None
    """The k tokens, int64."""


def row_divergence(logits: Float[Tensor, "R V"], target: Target, divergence: Divergence) -> Float[Tensor, " R"]:
    """Return the divergence of each row from the student's scaled logits."""
    student = logits.log_softmax(-1)
    return divergence.of(_on_support(student, target.ids), target.logprobs)


def logit_gradient(
    logits: Float[Tensor, "R V"], target: Target, divergence: Divergence, grad: Float[Tensor, " R"]
) -> Float[Tensor, "R V"]:
    """Return the gradient of the student's scaled logits for the upstream gradient `grad` of each row's divergence.

    The tokens of the bucket share its gradient in proportion to their probabilities, because the log-prob of a bucket
    is the log-sum-exp of theirs.
    """
    student = logits.log_softmax(-1)
    ids = target.ids
    if ids is None:
        return divergence.gradient(student, target.logprobs).mul_(grad[:, None])
    support = _on_support(student, ids)
    gradient = divergence.gradient(support, target.logprobs).mul_(grad[:, None])
    others = student.sub_(support[:, -1:]).exp_().mul_(gradient[:, -1:])
    return others.scatter_(-1, ids, gradient[:, :-1])


def _on_support(student: Tensor, ids: Tensor | None) -> Tensor:
    """Return log-probs of k tokens and of all others together, by summing the others: 1 - sum would cancel."""
    if ids is None:
        return student
    others = student.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([student.gather(-1, ids), others], -1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return _log_ratio(p, q).mul_(p.exp()).sum(-1)


def _log_ratio(p: Tensor, q: Tensor) -> Tensor:
    """Return log p - log q, and 0 where p = 0, because such an outcome adds nothing."""
    return (p - q).masked_fill_(p == -math.inf, 0.0)


def divergence_rows(
    rows: Float[Tensor, "R C"],
    head: nn.Module,
    teacher: "TeacherRows",
    divergence: Divergence,
    *,
    vocab_size: int,
    softcap: float | None = None,
    logit_divisor: float = 1.0,
) -> Float[Tensor, " R"]:
    """Return the divergence of each row, in float32 or wider; differentiable with respect to the student only.

    Args:
        rows: the student's hidden states.
        head: the student's head, hidden state to logits.
        teacher: distributions for the same rows.
        divergence: kind, and the temperature of both models.
        vocab_size: V, which determines the rows per chunk.
        softcap: bound on the student's logits; None leaves them unchanged.
        logit_divisor: divisor of the student's logits.

    Example: if both models give the same logits, every divergence is 0.
    """
    # Half as many rows as for log-probs, because two heads have logits.
    max_rows = max(1, max_logit_rows(rows.device, vocab_size) // 2)
    pieces = chunks(rows.shape[0], np.empty(0, np.int64), max_rows)
    of_logits = _OfTeacher(teacher, divergence, rows.device.type)
    temperature = divergence.temperature * logit_divisor
    (total,) = by_chunks(rows, head, pieces, of_logits, softcap=softcap, temperature=temperature)
    return total


class _OfTeacher(OfLogits):
    """Divergences from a teacher, computed from a chunk of the student's logits."""

    def __init__(self, teacher: "TeacherRows", divergence: Divergence, device: str) -> None:
        self._teacher, self._divergence, self._device = teacher, divergence, device
        # Record the autocast state for the teacher's head: a backward runs outside of it.
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
