"""A linear head whose logits are touched three times: product, one read for their sums, one write of their gradient.

Logits stay in the dtype of the product and are never widened. For a loss that is a sum over targets they are computed
once. For scores that any loss may follow, the logits of one chunk are kept for the first backward, which overwrites
them; those of more are computed again there.

    R rows   E scored tokens (each names its row)   V vocabulary   C hidden size
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treering.model.head.linear import RowChunk, add_product
from treering.model.logits import EntropyOf

FREE_SHARE = 8
"""Logits may take one in so many bytes of the device's free memory."""

MAX_ENTRIES = 2**31 - 1
"""Most logits held at once: beyond some thousand rows a product is no faster."""

DETERMINISTIC_ENTRIES = 2**29
"""Most logits held at once in deterministic mode: 1 GiB in bfloat16, 3,533 rows of 151,936."""


def has_kernels(device: torch.device) -> bool:
    """Whether the kernels run on a device: on CUDA with triton."""
    return device.type == "cuda" and find_spec("triton") is not None


def rows_at_once(device: torch.device, dtype: torch.dtype, vocab_size: int) -> int:
    """Rows whose logits are held at once on a CUDA device, at least 1: by its free memory.

    In deterministic mode by the vocabulary alone, because sums over other chunks round differently.
    """
    if torch.are_deterministic_algorithms_enabled():
        return max(1, DETERMINISTIC_ENTRIES // vocab_size)
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(1, min(MAX_ENTRIES, free // FREE_SHARE // dtype.itemsize) // vocab_size)


class ThreePassScores(torch.autograd.Function):
    """Log-probabilities and entropies of targets, as `LinearScores` gives them."""

    @staticmethod
    def forward(  # noqa: D102 - torch calls it
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        target_row: Tensor,
        pieces: tuple[RowChunk, ...],
        temperature: float,
        entropy_of: EntropyOf,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.pieces = 1.0 / temperature, pieces
        buffer = _buffer(rows, weight, pieces)
        parts = []
        for chunk in pieces:
            logits = _logits(rows[chunk.rows], weight, bias, buffer)
            parts.append(_statistics(logits, *_labels(chunk, targets, target_row), ctx.scale, entropy_of))
        lse, entropy, logprob = (torch.cat(one) for one in zip(*parts, strict=True))
        ctx.save_for_backward(rows, weight, bias, targets, target_row, lse, entropy, logprob)
        ctx.buffer = buffer if len(pieces) == 1 and any(ctx.needs_input_grad[:3]) else None
        return logprob, entropy[target_row]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102 - torch calls it
        from treering.model.head.kernels import write_gradient

        rows, weight, bias, targets, target_row, lse, entropy, logprob = ctx.saved_tensors
        # Overwritten here: another backward of the same graph computes them again.
        kept, ctx.buffer = ctx.buffer, None
        buffer = _buffer(rows, weight, ctx.pieces) if kept is None else kept
        sums = _GradientSums(rows, weight, ctx.needs_input_grad[:3])
        for chunk in ctx.pieces:
            logits = buffer if kept is not None else _logits(rows[chunk.rows], weight, bias, buffer)
            own = [None if grad is None else grad[chunk.targets] for grad in grads]
            statistics = lse[chunk.rows], entropy[chunk.rows]
            labels = *_labels(chunk, targets, target_row), logprob[chunk.targets]
            write_gradient(logits, *statistics, *labels, *own, scale=ctx.scale)
            sums.add(logits, chunk.rows)
        return (*sums.in_dtype(), None, None, None, None, None)


LossOf = Callable[[slice, Tensor, Tensor], Tensor]
"""(which targets, their log-probabilities, their entropies) -> their part of a loss, a scalar."""


class ThreePassLoss(torch.autograd.Function):
    """A loss that is a sum over targets, with its gradient: logits are computed once, and those of one chunk are held.

    The backward of each chunk's part of the loss runs in this forward, while its logits are there.
    """

    @staticmethod
    def forward(  # noqa: D102 - torch calls it
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        target_row: Tensor,
        pieces: tuple[RowChunk, ...],
        temperature: float,
        entropy_of: EntropyOf,
        loss_of: LossOf,
    ) -> Tensor:
        from treering.model.head.kernels import write_gradient

        scale, buffer, losses = 1.0 / temperature, _buffer(rows, weight, pieces), []
        sums = _GradientSums(rows, weight, ctx.needs_input_grad[:3])
        for chunk in pieces:
            logits = _logits(rows[chunk.rows], weight, bias, buffer)
            labels = _labels(chunk, targets, target_row)
            lse, entropy, logprob = _statistics(logits, *labels, scale, entropy_of)
            leaves = [logprob.detach().requires_grad_(), entropy[labels[1]].requires_grad_()]
            with torch.enable_grad():
                loss = loss_of(chunk.targets, *leaves)
            losses.append(loss.detach())
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
            write_gradient(logits, lse, entropy, *labels, logprob, *grads, scale=scale)
            sums.add(logits, chunk.rows)
        ctx.save_for_backward(*sums.in_dtype())
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102 - torch calls it
        own = [None if grad is None else grad * upstream.to(grad.dtype) for grad in ctx.saved_tensors]
        return (*own, None, None, None, None, None, None)


class _GradientSums:
    """Gradients of rows, weight and bias over chunks, the last two summed in float32; None for frozen ones."""

    def __init__(self, rows: Tensor, weight: Tensor, needed: tuple[bool, ...]) -> None:
        self._inputs = rows, weight
        self._rows = torch.empty_like(rows) if needed[0] else None
        self._weight = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None
        self._bias = weight.new_zeros(weight.shape[0], dtype=torch.float32) if needed[2] else None

    def add(self, grad_logits: Tensor, at: slice) -> None:
        """Adds what a chunk of rows gives."""
        rows, weight = self._inputs
        if self._rows is not None:
            torch.mm(grad_logits, weight, out=self._rows[at])
        if self._weight is not None:
            add_product(self._weight, grad_logits.mT, rows[at])
        if self._bias is not None:
            self._bias += grad_logits.sum(0, dtype=torch.float32)

    def in_dtype(self) -> tuple[Tensor | None, ...]:
        """The three in the dtype of the inputs."""
        dtype = self._inputs[0].dtype
        return tuple(None if grad is None else grad.to(dtype) for grad in (self._rows, self._weight, self._bias))


def _buffer(rows: Tensor, weight: Tensor, pieces: tuple[RowChunk, ...]) -> Tensor:
    largest = pieces[0].rows
    return rows.new_empty(largest.stop - largest.start, weight.shape[0])


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """Logits before the temperature, in the buffer."""
    logits = buffer[: rows.shape[0]]
    torch.mm(rows, weight.mT, out=logits)
    if bias is not None:
        logits += bias
    return logits


def _labels(chunk: RowChunk, targets: Tensor, target_row: Tensor) -> tuple[Tensor, Tensor]:
    """A chunk's targets, and the row of each within the chunk."""
    return targets[chunk.targets], target_row[chunk.targets] - chunk.rows.start


def _statistics(
    logits: Tensor, targets: Tensor, target_row: Tensor, scale: float, entropy_of: EntropyOf
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp and entropy of each row, and log-probability of each target."""
    from treering.model.head.kernels import row_statistics

    lse, entropy = row_statistics(logits, scale=scale, with_entropy=entropy_of == "all")
    return lse, entropy, logits[target_row, targets].to(torch.float32) * scale - lse[target_row]
