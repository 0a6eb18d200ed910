"""A linear head that touches its logits three times: product, one read for their sums, one write of their gradient.

Logits stay in the dtype of the product and are never widened. For a loss that is a sum over targets they are computed
once. For scores that any loss may follow, the logits of one chunk are kept for the first backward, which overwrites
them; those of several chunks are recomputed there.

    R rows   E scored tokens (each names its row)   V vocabulary   C hidden size
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treering.model.logits import BufferedHead, EntropyOf, GradientSums, RowChunk

FREE_SHARE = 8
"""Divisor of the device's free memory that gives the bytes for logits."""

MAX_ENTRIES = 2**31 - 1
"""Most logits held at once: beyond a few thousand rows a product gets no faster."""

DETERMINISTIC_ENTRIES = 2**29
"""Most logits held at once in deterministic mode: 1 GiB in bfloat16, 3,533 rows of 151,936."""


def has_kernels(device: torch.device) -> bool:
    """Return whether the kernels run on a device: on CUDA with triton."""
    return device.type == "cuda" and find_spec("triton") is not None


_ROWS: dict[tuple[torch.device, torch.dtype, torch.Size], int] = {}
"""Rows of a chunk since the step began, by device, dtype of the logits and shape of the weight."""


def begin_step() -> None:
    """Let chunks of rows grow again if memory has been freed since the last step."""
    _ROWS.clear()


def rows_at_once(device: torch.device, dtype: torch.dtype, weight_shape: torch.Size) -> int:
    """Return the rows of a chunk on a CUDA device: a power of two by free memory, which never grows during a step.

    So the allocator finds a buffer of the same size again, whereas a buffer of another size would make it wait for the
    device. In deterministic mode the vocabulary determines the rows, because sums over other chunks round differently.

    Args:
        device: device of the logits.
        dtype: dtype of the logits.
        weight_shape: [V, C], shape of the weight, whose gradient is summed in float32.
    """
    vocab_size = weight_shape[0]
    if torch.are_deterministic_algorithms_enabled():
        return max(1, DETERMINISTIC_ENTRIES // vocab_size)
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # The sum, and its copy in the dtype of the weight.
    free = max(0, free - weight_shape.numel() * (torch.float32.itemsize + dtype.itemsize))
    rows = max(1, min(MAX_ENTRIES, free // FREE_SHARE // dtype.itemsize) // vocab_size)
    key = device, dtype, weight_shape
    _ROWS[key] = min(1 << (rows.bit_length() - 1), _ROWS.get(key, rows))
    return _ROWS[key]


class ThreePassScores(torch.autograd.Function):
    """Log-probs and entropies of targets, as in `score_rows`."""

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
        head, parts = BufferedHead(weight, bias, pieces), []
        for chunk in pieces:
            logits = head.product(rows[chunk.rows])
            parts.append(_statistics(logits, *chunk.labels(targets, target_row), ctx.scale, entropy_of))
        lse, entropy, logprob = (torch.cat(one) for one in zip(*parts, strict=True))
        ctx.save_for_backward(rows, weight, bias, targets, target_row, lse, entropy, logprob)
        ctx.logits = logits if len(pieces) == 1 and any(ctx.needs_input_grad[:3]) else None
        return logprob, entropy[target_row]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102 - torch calls it
        from treering.model.head_kernels import write_gradient

        rows, weight, bias, targets, target_row, lse, entropy, logprob = ctx.saved_tensors
        # Overwritten here: another backward of the same graph computes them again.
        kept, ctx.logits = ctx.logits, None
        head = BufferedHead(weight, bias, ctx.pieces)
        sums = GradientSums(rows, weight, ctx.needs_input_grad[:3])
        for chunk in ctx.pieces:
            logits = head.product(rows[chunk.rows]) if kept is None else kept
            own = [None if grad is None else grad[chunk.targets] for grad in grads]
            statistics = lse[chunk.rows], entropy[chunk.rows]
            labels = *chunk.labels(targets, target_row), logprob[chunk.targets]
            write_gradient(logits, *statistics, *labels, *own, scale=ctx.scale)
            sums.add(logits, chunk.rows)
        return (*sums.in_dtype(), None, None, None, None, None)


LossOfTargets = Callable[[slice, Tensor, Tensor], Tensor]
"""(which targets, their log-probs, their entropies) -> their part of a loss, a scalar."""


class ThreePassLoss(torch.autograd.Function):
    """Loss that is a sum over targets, with its gradient: logits are computed once, and one chunk's are held.

    The backward of each chunk's part of the loss runs in this forward, while its logits exist.
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
        loss_of: LossOfTargets,
    ) -> Tensor:
        from treering.model.head_kernels import write_gradient

        scale, head, losses = 1.0 / temperature, BufferedHead(weight, bias, pieces), []
        sums = GradientSums(rows, weight, ctx.needs_input_grad[:3])
        for chunk in pieces:
            logits = head.product(rows[chunk.rows])
            labels = chunk.labels(targets, target_row)
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
        own = ctx.saved_tensors
        if not _is_one(upstream):
            own = [None if grad is None else grad * upstream.to(grad.dtype) for grad in own]
        return (*own, None, None, None, None, None, None)


_ONES: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def backward_of(loss: Tensor) -> None:
    """Run `loss.backward()` so that a `ThreePassLoss` term of the loss knows that its gradient is 1.

    Its weight gradient [V, C] is then not multiplied, and the value is not read from the device.
    """
    key = loss.device, loss.dtype
    if key not in _ONES:
        _ONES[key] = torch.ones((), device=loss.device, dtype=loss.dtype)
    loss.backward(_ONES[key])  # type: ignore[no-untyped-call]


def _is_one(upstream: Tensor) -> bool:
    """Return whether a gradient is the 1 that `backward_of` started with: sums pass the tensor itself on."""
    one = _ONES.get((upstream.device, upstream.dtype))
    return one is not None and upstream.data_ptr() == one.data_ptr()


def _statistics(
    logits: Tensor, targets: Tensor, target_row: Tensor, scale: float, entropy_of: EntropyOf
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-sum-exp and entropy of each row, and the log-prob of each target."""
    from treering.model.head_kernels import row_statistics

    lse, entropy = row_statistics(logits, scale=scale, with_entropy=entropy_of == "all")
    return lse, entropy, logits[target_row, targets].to(torch.float32) * scale - lse[target_row]
