"""A linear head whose logits are touched three times: product, one read for their sums, one write of their gradient.

Logits stay in the dtype of the product and are never widened. Where all rows are one chunk they are kept for the first
backward, which overwrites them, else computed again there.

    R rows   E scored tokens (each names its row)   V vocabulary   C hidden size
"""

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
        from treering.model.head.kernels import row_statistics

        ctx.set_materialize_grads(False)
        ctx.scale, ctx.pieces = 1.0 / temperature, pieces
        logprobs, lses, entropies = [], [], []
        buffer = _buffer(rows, weight, pieces)
        for chunk in pieces:
            logits = _logits(rows[chunk.rows], weight, bias, buffer)
            lse, entropy = row_statistics(logits, scale=ctx.scale, with_entropy=entropy_of == "all")
            own_rows = target_row[chunk.targets] - chunk.rows.start
            picked = logits[own_rows, targets[chunk.targets]].to(torch.float32) * ctx.scale
            logprobs.append(picked - lse[own_rows])
            lses.append(lse)
            entropies.append(entropy)
        lse, entropy, logprob = torch.cat(lses), torch.cat(entropies), torch.cat(logprobs)
        ctx.save_for_backward(rows, weight, bias, targets, target_row, lse, entropy, logprob)
        ctx.buffer = buffer if len(pieces) == 1 and any(ctx.needs_input_grad[:3]) else None
        return logprob, entropy[target_row]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102 - torch calls it
        from treering.model.head.kernels import write_gradient

        rows, weight, bias, targets, target_row, lse, entropy, logprob = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Overwritten here: another backward of the same graph computes them again.
        kept, ctx.buffer = ctx.buffer, None
        buffer = _buffer(rows, weight, ctx.pieces) if kept is None else kept
        grad_rows = torch.empty_like(rows) if needs_rows else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if needs_bias else None
        for chunk in ctx.pieces:
            logits = buffer if kept is not None else _logits(rows[chunk.rows], weight, bias, buffer)
            own_rows = target_row[chunk.targets] - chunk.rows.start
            own = [None if grad is None else grad[chunk.targets] for grad in grads]
            statistics = lse[chunk.rows], entropy[chunk.rows]
            labels = targets[chunk.targets], own_rows, logprob[chunk.targets]
            write_gradient(logits, *statistics, *labels, *own, scale=ctx.scale)
            if grad_rows is not None:
                torch.mm(logits, weight, out=grad_rows[chunk.rows])
            if grad_weight is not None:
                add_product(grad_weight, logits.mT, rows[chunk.rows])
            if grad_bias is not None:
                grad_bias += logits.sum(0, dtype=torch.float32)
        in_dtype = [None if grad is None else grad.to(rows.dtype) for grad in (grad_rows, grad_weight, grad_bias)]
        return (*in_dtype, None, None, None, None, None)


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
