"""A linear head in chunks of rows: few logits at a time, one gradient of the weight.

Logits are recomputed in the backward; no [R, V] and no second [V, C] tensor is ever held.

    R rows   E scored tokens (each names its row)   V vocabulary   C hidden size
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

WIDE_SUMS_ON = "cuda" if torch.__version__ >= "2.11" else None
"""The type of device on which one product of 16-bit factors adds to a float32 sum."""


class RowChunk(NamedTuple):
    """Some rows, and the targets that they score."""

    rows: slice
    targets: slice

    def labels(self, targets: Tensor, target_row: Tensor) -> tuple[Tensor, Tensor]:
        """The chunk's targets, and the row of each within the chunk."""
        return targets[self.targets], target_row[self.targets] - self.rows.start


def chunks(num_rows: int, target_row: NDArray[np.int64], max_rows: int) -> tuple[RowChunk, ...]:
    """Splits rows into chunks of `max_rows` with their targets; `target_row`, on the host, is ascending.

    Example: 3 rows by 2 with target_row [0, 1, 1, 2] are rows 0:2 with targets 0:3, and row 2:3 with target 3:4.
    """
    starts = range(0, max(1, num_rows), max_rows)
    bounds = [*np.searchsorted(target_row, list(starts)).tolist(), target_row.size]
    return tuple(
        RowChunk(slice(start, min(start + max_rows, num_rows)), slice(bounds[i], bounds[i + 1]))
        for i, start in enumerate(starts)
    )


class OfLogits(ABC):
    """What is computed from the scaled logits [R, V] of each chunk of rows, and its gradient with respect to them."""

    @abstractmethod
    def on_graph(self, logits: Tensor, chunk: RowChunk) -> tuple[Tensor, ...]:
        """The values, differentiable with respect to the logits."""

    @abstractmethod
    def values(self, logits: Tensor, chunk: RowChunk) -> tuple[Tensor, ...]:
        """The same without a graph; may overwrite the logits."""

    @abstractmethod
    def gradient(self, logits: Tensor, chunk: RowChunk, grads: Sequence[Tensor | None]) -> Tensor:
        """Gradient of the logits for gradients of the values of all chunks; may overwrite the logits."""


class LinearRows(torch.autograd.Function):
    """Values of a linear head's logits in chunks of rows; nothing of size [R, V] or a second [V, C] is ever held."""

    @staticmethod
    def forward(  # noqa: D102 - torch calls it
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        pieces: tuple[RowChunk, ...],
        temperature: float,
        of_logits: OfLogits,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.pieces, ctx.temperature, ctx.of_logits = pieces, temperature, of_logits
        ctx.save_for_backward(rows, weight, bias)
        head = BufferedHead(weight, bias, pieces, temperature)
        parts = [of_logits.values(head.logits(rows[chunk.rows]), chunk) for chunk in pieces]
        return tuple(torch.cat(one) for one in zip(*parts, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102 - torch calls it
        rows, weight, bias = ctx.saved_tensors
        head = BufferedHead(weight, bias, ctx.pieces, ctx.temperature)
        sums = GradientSums(rows, weight, ctx.needs_input_grad[:3])
        for chunk in ctx.pieces:
            gradient = ctx.of_logits.gradient(head.logits(rows[chunk.rows]), chunk, grads)
            sums.add(head.unscaled(gradient), chunk.rows)
        return (*sums.in_dtype(), None, None, None)


class BufferedHead:
    """A linear head that reuses one logits buffer: page faults of a new array per chunk cost as much as the product."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, pieces: tuple[RowChunk, ...], temperature: float = 1.0
    ) -> None:
        """Allocates nothing before the first product."""
        self._weight, self._bias, self._temperature = weight, bias, temperature
        self._num_rows = pieces[0].rows.stop - pieces[0].rows.start
        self._buffers: dict[torch.dtype, Tensor] = {}

    def product(self, rows: Tensor) -> Tensor:
        """Logits [rows, V] before the temperature, in the dtype of the weight, valid until the next call."""
        logits = self._buffer(self._weight.dtype)[: rows.shape[0]]
        torch.mm(rows, self._weight.mT, out=logits)
        if self._bias is not None:
            logits += self._bias
        return logits

    def logits(self, rows: Tensor) -> Tensor:
        """Scaled logits [rows, V], float32 or wider, valid until the next call; the caller may overwrite them."""
        logits = self.product(rows)
        wide = torch.promote_types(logits.dtype, torch.float32)
        if logits.dtype != wide:
            logits = self._buffer(wide)[: rows.shape[0]].copy_(logits)
        return logits if self._temperature == 1.0 else logits.div_(self._temperature)

    def unscaled(self, grad_logits: Tensor) -> Tensor:
        """The gradient before the temperature, in the dtype of the weight; overwrites its input."""
        grad = grad_logits if self._temperature == 1.0 else grad_logits.div_(self._temperature)
        return grad.to(self._weight.dtype)

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._buffers:
            self._buffers[dtype] = self._weight.new_empty(self._num_rows, self._weight.shape[0], dtype=dtype)
        return self._buffers[dtype]


class GradientSums:
    """Gradients of rows, weight and bias over chunks, the last two summed in float32 or wider; None for frozen ones."""

    def __init__(self, rows: Tensor, weight: Tensor, needed: tuple[bool, ...]) -> None:
        """`needed`: whether the rows, the weight and the bias need a gradient."""
        self._inputs = rows, weight
        self._wide = torch.promote_types(weight.dtype, torch.float32)
        self._rows = torch.empty_like(rows) if needed[0] else None
        self._weight = torch.zeros_like(weight, dtype=self._wide) if needed[1] else None
        self._bias = weight.new_zeros(weight.shape[0], dtype=self._wide) if needed[2] else None

    def add(self, grad_logits: Tensor, at: slice) -> None:
        """Adds what a chunk of rows gives."""
        rows, weight = self._inputs
        if self._rows is not None:
            torch.mm(grad_logits, weight, out=self._rows[at])
        if self._weight is not None:
            add_product(self._weight, grad_logits.mT, rows[at])
        if self._bias is not None:
            self._bias += grad_logits.sum(0, dtype=self._wide)

    def in_dtype(self) -> tuple[Tensor | None, ...]:
        """The three in the dtype of the inputs."""
        dtype = self._inputs[0].dtype
        return tuple(None if grad is None else grad.to(dtype) for grad in (self._rows, self._weight, self._bias))


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
