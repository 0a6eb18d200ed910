"""Log-probs, entropies and their gradients from logits, and a linear head that computes them in chunks.

With chunks, logits are recomputed in the backward; no [R, V] and no second [V, C] tensor is ever held.

    R rows   E scored tokens (each names its row)   V vocabulary   C hidden size
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

EntropyOf = Literal["all", "none"]
"""Whether to compute entropies; "none" returns zeros and saves two passes over the logits."""


def scaled_logits(
    head: Callable[[Tensor], Tensor], rows: Float[Tensor, "R C"], *, softcap: float | None, temperature: float
) -> Float[Tensor, "R V"]:
    """Return the logits of hidden rows, bounded as in the model and divided by the temperature; float32 or wider.

    Example: a logit of 4 with softcap 2 and temperature 0.5 is 2 tanh(4 / 2) / 0.5 = 3.86.
    """
    logits = head(rows)
    if softcap is not None:
        # In the head's own dtype, as the models do.
        logits = softcap * torch.tanh(logits / softcap)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide / temperature


class LogitScores(torch.autograd.Function):
    """Scores from logits [R, V]; saves the logits once instead of the chain of softmax intermediates."""

    @staticmethod
    def forward(  # noqa: D102 - torch calls it
        ctx: Any, logits: Tensor, targets: Tensor, target_row: Tensor, entropy_of: EntropyOf
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        lse, entropy = consume_logits(logits.clone(), entropy_of)
        ctx.save_for_backward(logits, lse, entropy, targets, target_row)
        return logits[target_row, targets] - lse[target_row], entropy[target_row]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:  # noqa: D102 - torch calls it
        logits, lse, entropy, targets, target_row = ctx.saved_tensors
        return logit_gradient(logits - lse[:, None], entropy, targets, target_row, *grads), None, None, None


def logit_gradient(
    log_weights: Float[Tensor, "R V"],
    entropy: Float[Tensor, " R"],
    targets: Int[Tensor, " E"],
    target_row: Int[Tensor, " E"],
    grad_logprobs: Float[Tensor, " E"] | None,
    grad_entropy: Float[Tensor, " E"] | None,
) -> Float[Tensor, "R V"]:
    """Return the gradient of the scaled logits; overwrites `log_weights`.

    With weights p: d logp[t] / d logits = onehot(t) - p, and d H / d logits = -p (log p + H).
    """
    zeros = torch.zeros_like(entropy)
    factor: Tensor | None = None
    if grad_entropy is not None:
        factor = -zeros.index_add(0, target_row, grad_entropy)[:, None]
        factor = factor * (log_weights + entropy[:, None]).nan_to_num_(neginf=0.0)
    if grad_logprobs is not None:
        row_grad = zeros.index_add(0, target_row, grad_logprobs)[:, None]
        factor = -row_grad if factor is None else factor - row_grad
    assert factor is not None, "autograd computes only gradients that something needs"
    grad_logits = log_weights.exp_().mul_(factor)
    if grad_logprobs is not None:
        grad_logits.index_put_((target_row, targets), grad_logprobs, accumulate=True)
    return grad_logits


def consume_logits(
    logits: Float[Tensor, "R V"], entropy_of: EntropyOf
) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Return log-sum-exp and entropy of each row; overwrites the logits instead of allocating arrays of their size."""
    top = logits.amax(-1, keepdim=True)
    logits.sub_(top)
    if entropy_of == "none":
        lse = logits.exp_().sum(-1).log_() + top[:, 0]
        return lse, torch.zeros_like(lse)
    weights = logits.exp()
    total = weights.sum(-1)
    # A masked token (logit -inf) has weight 0 and adds nothing: 0 * -inf must count as 0.
    mean = weights.mul_(logits.nan_to_num_(neginf=0.0)).sum(-1) / total
    return total.log() + top[:, 0], total.log() - mean


WIDE_SUMS_ON = "cuda" if torch.__version__ >= "2.11" else None
"""Device type on which a product of 16-bit factors is added to a float32 sum in one operation."""


class RowChunk(NamedTuple):
    """Range of rows, and the targets that they score."""

    rows: slice
    targets: slice

    def labels(self, targets: Tensor, target_row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chunk's targets, and the row of each within the chunk."""
        return targets[self.targets], target_row[self.targets] - self.rows.start


def chunks(num_rows: int, target_row: NDArray[np.int64], max_rows: int) -> tuple[RowChunk, ...]:
    """Split rows into chunks of `max_rows` with their targets; `target_row`, on the host, is ascending.

    Example: 3 rows by 2 with target_row [0, 1, 1, 2] are rows 0:2 with targets 0:3, and row 2:3 with target 3:4.
    """
    starts = range(0, max(1, num_rows), max_rows)
    bounds = [*np.searchsorted(target_row, list(starts)).tolist(), target_row.size]
    return tuple(
        RowChunk(slice(start, min(start + max_rows, num_rows)), slice(bounds[i], bounds[i + 1]))
        for i, start in enumerate(starts)
    )


class OfLogits(ABC):
    """Computation on the scaled logits [R, V] of each chunk of rows, and its gradient with respect to them."""

    @abstractmethod
    def on_graph(self, logits: Tensor, chunk: RowChunk) -> tuple[Tensor, ...]:
        """Return the values, differentiable with respect to the logits."""

    @abstractmethod
    def values(self, logits: Tensor, chunk: RowChunk) -> tuple[Tensor, ...]:
        """Return the same values without a graph; may overwrite the logits."""

    @abstractmethod
    def gradient(self, logits: Tensor, chunk: RowChunk, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the gradient of the logits, given gradients of the values of all chunks; may overwrite the logits."""


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
    """Linear head that reuses one logits buffer: page faults of a new array per chunk cost as much as the product."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, pieces: tuple[RowChunk, ...], temperature: float = 1.0
    ) -> None:
        """Set the sizes of the head; memory is allocated at the first product."""
        self._weight, self._bias, self._temperature = weight, bias, temperature
        rows = pieces[0].rows.stop - pieces[0].rows.start
        # Few sizes, so that CUDA's allocator finds a buffer again; the unused part is not touched.
        self._num_rows = 1 << (rows - 1).bit_length() if weight.is_cuda else rows
        self._buffers: dict[torch.dtype, Tensor] = {}

    def product(self, rows: Tensor) -> Tensor:
        """Return logits [rows, V] before the temperature, in the dtype of the weight, valid until the next call."""
        logits = self._buffer(self._weight.dtype)[: rows.shape[0]]
        torch.mm(rows, self._weight.mT, out=logits)
        if self._bias is not None:
            logits += self._bias
        return logits

    def logits(self, rows: Tensor) -> Tensor:
        """Return scaled logits [rows, V], float32 or wider, valid until the next call and free to overwrite."""
        logits = self.product(rows)
        wide = torch.promote_types(logits.dtype, torch.float32)
        if logits.dtype != wide:
            logits = self._buffer(wide)[: rows.shape[0]].copy_(logits)
        return logits if self._temperature == 1.0 else logits.div_(self._temperature)

    def unscaled(self, grad_logits: Tensor) -> Tensor:
        """Return the gradient before the temperature, in the dtype of the weight; overwrites its input."""
        grad = grad_logits if self._temperature == 1.0 else grad_logits.div_(self._temperature)
        return grad.to(self._weight.dtype)

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._buffers:
            self._buffers[dtype] = self._weight.new_empty(self._num_rows, self._weight.shape[0], dtype=dtype)
        return self._buffers[dtype]


class GradientSums:
    """Gradients of rows, weight and bias over chunks, the last two summed in float32 or wider; None for frozen ones."""

    def __init__(self, rows: Tensor, weight: Tensor, needed: tuple[bool, ...]) -> None:
        """Allocate the sums; `needed` says whether rows, weight and bias need a gradient."""
        self._inputs = rows, weight
        self._wide = torch.promote_types(weight.dtype, torch.float32)
        self._rows = torch.empty_like(rows) if needed[0] else None
        self._weight = torch.zeros_like(weight, dtype=self._wide) if needed[1] else None
        self._bias = weight.new_zeros(weight.shape[0], dtype=self._wide) if needed[2] else None

    def add(self, grad_logits: Tensor, at: slice) -> None:
        """Add the gradients of a chunk of rows."""
        rows, weight = self._inputs
        if self._rows is not None:
            torch.mm(grad_logits, weight, out=self._rows[at])
        if self._weight is not None:
            add_product(self._weight, grad_logits.mT, rows[at])
        if self._bias is not None:
            self._bias += grad_logits.sum(0, dtype=self._wide)

    def in_dtype(self) -> tuple[Tensor | None, ...]:
        """Return the three gradients in the dtypes of the inputs."""
        dtype = self._inputs[0].dtype
        return tuple(None if grad is None else grad.to(dtype) for grad in (self._rows, self._weight, self._bias))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, which may be float32 if the factors have 16 bits.

    With a wider total this takes a 16-bit product and a pass over the total; on CUDA only a product, added in float32.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.device.type == WIDE_SUMS_ON:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
