"""Score rows with a linear head in chunks: few logits at a time, one gradient of the weight.

Logits are recomputed in the backward; no [R, V] and no second [V, C] tensor is ever held.

    R rows   E scored tokens (each names its row)   V vocabulary   C hidden size
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from treering.model.logits import EntropyOf, consume_logits, logit_gradient

WIDE_SUMS_ON = "cuda" if torch.__version__ >= "2.11" else None
"""The type of device on which one product of 16-bit factors adds to a float32 sum."""


class RowChunk(NamedTuple):
    """Some rows, and the targets that they score."""

    rows: slice
    targets: slice


def chunks(num_rows: int, target_row: NDArray[np.int64], max_rows: int) -> tuple[RowChunk, ...]:
    """Splits rows into chunks of `max_rows` with their targets; `target_row`, on the host, is ascending.

    Example: 3 rows by 2 with target_row [0, 1, 1, 2] are rows 0:2 with targets 0:3, and row 2:3 with target 3:4.
    """
    starts = range(0, num_rows, max_rows)
    bounds = [*np.searchsorted(target_row, list(starts)).tolist(), target_row.size]
    return tuple(
        RowChunk(slice(start, min(start + max_rows, num_rows)), slice(bounds[i], bounds[i + 1]))
        for i, start in enumerate(starts)
    )


class LinearScores(torch.autograd.Function):
    """Scores from a linear head in chunks of rows; nothing of size [R, V] or a second [V, C] is ever held."""

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
        ctx.temperature, ctx.pieces = temperature, pieces
        head = BufferedHead(weight, bias, temperature=temperature, max_rows=_size(pieces[0].rows))
        logprobs, lses, entropies = [], [], []
        for chunk in pieces:
            logits = head.logits(rows[chunk.rows])
            own_rows = target_row[chunk.targets] - chunk.rows.start
            picked = logits[own_rows, targets[chunk.targets]]
            lse, entropy = consume_logits(logits, entropy_of)
            lses.append(lse)
            entropies.append(entropy)
            logprobs.append(picked - lse[own_rows])
        lse, entropy = torch.cat(lses), torch.cat(entropies)
        ctx.save_for_backward(rows, weight, bias, targets, target_row, lse, entropy)
        return torch.cat(logprobs), entropy[target_row]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102 - torch calls it
        rows, weight, bias, targets, target_row, lse, entropy = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        head = BufferedHead(weight, bias, temperature=ctx.temperature, max_rows=_size(ctx.pieces[0].rows))
        grad_rows = torch.empty_like(rows) if needs_rows else None
        grad_weight = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device) if needs_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=lse.dtype, device=bias.device) if needs_bias else None
        for chunk in ctx.pieces:
            own_rows = target_row[chunk.targets] - chunk.rows.start
            log_weights = head.logits(rows[chunk.rows]).sub_(lse[chunk.rows, None])
            own = [None if grad is None else grad[chunk.targets] for grad in grads]
            upstream = logit_gradient(log_weights, entropy[chunk.rows], targets[chunk.targets], own_rows, *own)
            upstream = head.unscaled(upstream)
            if grad_rows is not None:
                grad_rows[chunk.rows] = upstream @ weight
            if grad_weight is not None:
                add_product(grad_weight, upstream.mT, rows[chunk.rows])
            if grad_bias is not None:
                grad_bias += upstream.sum(0)
        in_dtype = [None if grad is None else grad.to(rows.dtype) for grad in (grad_rows, grad_weight, grad_bias)]
        return (*in_dtype, None, None, None, None, None)


def _size(rows: slice) -> int:
    size: int = rows.stop - rows.start
    return size


class BufferedHead:
    """A linear head that reuses one logits buffer: page faults of a new array per chunk cost as much as the product."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, temperature: float, max_rows: int) -> None:
        self._weight, self._bias, self._temperature = weight, bias, temperature
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._computed = torch.empty(max_rows, weight.shape[0], dtype=weight.dtype, device=weight.device)
        self._wide = self._computed if wide == weight.dtype else torch.empty_like(self._computed, dtype=wide)

    def logits(self, rows: Tensor) -> Tensor:
        """Scaled logits [rows, V], float32 or wider, valid until the next call; the caller may overwrite them."""
        computed, logits = self._computed[: rows.shape[0]], self._wide[: rows.shape[0]]
        torch.mm(rows, self._weight.mT, out=computed)
        if self._bias is not None:
            computed += self._bias
        if logits.dtype != computed.dtype:
            logits.copy_(computed)
        return logits if self._temperature == 1.0 else logits.div_(self._temperature)

    def unscaled(self, grad_logits: Tensor) -> Tensor:
        """The gradient before the temperature, in the dtype of the weight; overwrites its input."""
        grad = grad_logits if self._temperature == 1.0 else grad_logits.div_(self._temperature)
        return grad.to(self._weight.dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left @ right` to `total`, which may be float32 where the factors have 16 bits.

    A wider total costs a product in 16 bits and a pass over the total; on CUDA neither: the product adds in float32.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.device.type == WIDE_SUMS_ON:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
