"""Log-probability and entropy of chosen tokens from hidden rows, in bounded memory, with exact gradients.

Three ways compute the same thing: all rows at one time, which saves their logits; a linear head in chunks of rows,
whose logits are computed again in the backward and whose weight gradient is summed in place; any other head in
checkpointed chunks. Knows rows and heads; knows nothing of forests.

    R rows   E scored tokens (each names its row)   V vocabulary   C hidden size
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

MAX_LOGIT_ENTRIES = 2**24
"""At most this many logits are held at one time (64 MiB in float32), once more for their gradient."""

EntropyOf = Literal["all", "none"]
"""Whether entropies are computed; "none" gives zeros and saves two passes over the logits."""


class Scores(NamedTuple):
    """Log-probability of each scored token and entropy of the distribution it was scored with, float32 or wider."""

    logprobs: Float[Tensor, " E"]
    entropy: Float[Tensor, " E"]


def score_rows(
    rows: Float[Tensor, "R C"],
    head: nn.Module,
    targets: Int[Tensor, " E"],
    target_row: Int[Tensor, " E"],
    *,
    temperature: float,
    entropy_of: EntropyOf,
    vocab_size: int,
) -> Scores:
    """Scores `targets[e]` with `log_softmax(head(rows[target_row[e]]) / temperature)`.

    Args:
        rows: hidden states.
        head: hidden state to logits.
        targets: token ids, int64.
        target_row: row of each target, int64, ascending; a row may have several targets.
        temperature: divides the logits.
        entropy_of: "all" or "none".
        vocab_size: V, which decides how many rows a chunk has.

    Example: one row with logits [0, 0] scores token 1 at log 0.5 = -0.693, with entropy 0.693.
    """
    max_rows = max(1, MAX_LOGIT_ENTRIES // vocab_size)
    if rows.shape[0] <= max_rows:
        return _score_chunk(rows, head, targets, target_row, temperature, entropy_of)
    if _is_plain_linear(head):
        dtype = _compute_dtype(rows)
        bias: Tensor | None = head.bias
        bias = None if bias is None else bias.to(dtype)
        return Scores(
            *_LinearScores.apply(  # type: ignore[no-untyped-call]
                rows.to(dtype), head.weight.to(dtype), bias, targets, target_row, temperature, entropy_of, max_rows
            )
        )
    chunks = [
        checkpoint(
            _score_chunk,
            rows[c.rows],
            head,
            targets[c.targets],
            c.own_rows,
            temperature,
            entropy_of,
            use_reentrant=False,
        )
        for c in _chunks(rows.shape[0], target_row, max_rows)
    ]
    return Scores(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def _is_plain_linear(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling the module is exactly one matrix product: no subclass, and no hook that wants to see the call."""
    return type(head) is nn.Linear and not head._forward_hooks and not head._forward_pre_hooks


class _Chunk(NamedTuple):
    rows: slice
    targets: slice
    own_rows: Tensor  # rows of the chunk's targets, counted from its first row


def _chunks(num_rows: int, target_row: Tensor, max_rows: int) -> Iterator[_Chunk]:
    starts = torch.arange(0, num_rows + max_rows, max_rows, device=target_row.device)
    bounds = torch.searchsorted(target_row, starts).tolist()
    for i, start in enumerate(range(0, num_rows, max_rows)):
        targets = slice(bounds[i], bounds[i + 1])
        yield _Chunk(slice(start, min(start + max_rows, num_rows)), targets, target_row[targets] - start)


def _compute_dtype(rows: Tensor) -> torch.dtype:
    """The dtype that a linear layer would compute in here."""
    device = rows.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype


def _score_chunk(
    rows: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    target_row: Tensor,
    temperature: float,
    entropy_of: EntropyOf,
) -> Scores:
    logits = _scaled(head(rows), temperature)
    return Scores(*_LogitScores.apply(logits, targets, target_row, entropy_of))  # type: ignore[no-untyped-call]


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide / temperature


class _LogitScores(torch.autograd.Function):
    """Scores from logits [R, V]; saves the logits once instead of the chain of softmax intermediates."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, target_row: Tensor, entropy_of: EntropyOf
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        lse = logits.logsumexp(-1)
        entropy = _row_entropy(logits, lse, entropy_of)
        ctx.save_for_backward(logits, lse, entropy, targets, target_row)
        return logits[target_row, targets] - lse[target_row], entropy[target_row]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits, lse, entropy, targets, target_row = ctx.saved_tensors
        return _logit_gradient(logits - lse[:, None], entropy, targets, target_row, *grads), None, None, None


class _LinearScores(torch.autograd.Function):
    """Scores from a linear head in chunks of rows; nothing of size [R, V] or a second [V, C] is ever held."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        target_row: Tensor,
        temperature: float,
        entropy_of: EntropyOf,
        max_rows: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.max_rows = temperature, max_rows
        logprobs, lses, entropies = [], [], []
        for chunk in _chunks(rows.shape[0], target_row, max_rows):
            logits = _scaled(nn.functional.linear(rows[chunk.rows], weight, bias), temperature)
            lse = logits.logsumexp(-1)
            lses.append(lse)
            entropies.append(_row_entropy(logits, lse, entropy_of))
            logprobs.append(logits[chunk.own_rows, targets[chunk.targets]] - lse[chunk.own_rows])
        lse, entropy = torch.cat(lses), torch.cat(entropies)
        ctx.save_for_backward(rows, weight, bias, targets, target_row, lse, entropy)
        return torch.cat(logprobs), entropy[target_row]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, weight, bias, targets, target_row, lse, entropy = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = lse.dtype
        grad_rows = torch.empty_like(rows) if needs_rows else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=wide, device=bias.device) if needs_bias else None
        for chunk in _chunks(rows.shape[0], target_row, ctx.max_rows):
            log_weights = _scaled(nn.functional.linear(rows[chunk.rows], weight, bias), ctx.temperature)
            log_weights = log_weights - lse[chunk.rows, None]
            own = [None if grad is None else grad[chunk.targets] for grad in grads]
            upstream = _logit_gradient(log_weights, entropy[chunk.rows], targets[chunk.targets], chunk.own_rows, *own)
            upstream = (upstream if ctx.temperature == 1.0 else upstream / ctx.temperature).to(rows.dtype)
            if grad_rows is not None:
                grad_rows[chunk.rows] = upstream @ weight
            if grad_weight is not None:
                _add_product(grad_weight, upstream.mT, rows[chunk.rows])
            if grad_bias is not None:
                grad_bias += upstream.sum(0)
        in_dtype = [None if grad is None else grad.to(rows.dtype) for grad in (grad_rows, grad_weight, grad_bias)]
        return (*in_dtype, None, None, None, None, None)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left @ right` to `total`, in place where the dtypes allow it; `total` may be wider than the factors."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    total += left @ right


def _row_entropy(logits: Float[Tensor, "R V"], lse: Float[Tensor, " R"], entropy_of: EntropyOf) -> Float[Tensor, " R"]:
    if entropy_of == "none":
        return torch.zeros_like(lse)
    log_weights = logits - lse[:, None]
    # A hidden token (logit -inf) has weight 0 and adds nothing: 0 * -inf must count as 0.
    return -(log_weights.exp() * log_weights.nan_to_num_(neginf=0.0)).sum(-1)


def _logit_gradient(
    log_weights: Float[Tensor, "R V"],
    entropy: Float[Tensor, " R"],
    targets: Int[Tensor, " E"],
    target_row: Int[Tensor, " E"],
    grad_logprobs: Float[Tensor, " E"] | None,
    grad_entropy: Float[Tensor, " E"] | None,
) -> Float[Tensor, "R V"]:
    """Gradient of the scaled logits; overwrites `log_weights`.

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
    assert factor is not None, "autograd asked for a gradient that nothing needs"
    grad_logits = log_weights.exp_().mul_(factor)
    if grad_logprobs is not None:
        grad_logits.index_put_((target_row, targets), grad_logprobs, accumulate=True)
    return grad_logits
