"""Log-prob and entropy of chosen tokens from hidden rows, in bounded memory, with exact gradients.

Four implementations compute the same. On CUDA a linear head runs on kernels that touch its logits three times.
Elsewhere: all rows at once, saving their logits; a linear head in chunks of rows, recomputing logits in the backward
and summing the weight gradient in place; any other head in checkpointed chunks.

    R rows   E scored tokens (each names its row)   V vocabulary   C hidden size
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from treering.attention.layout import to_device
from treering.model.logits import (
    EntropyOf,
    LinearRows,
    LogitScores,
    OfLogits,
    RowChunk,
    chunks,
    consume_logits,
    logit_gradient,
    scaled_logits,
)
from treering.model.three_pass import ThreePassScores, has_kernels, rows_at_once

MAX_LOGIT_ENTRIES = MappingProxyType({"cpu": 2**24, "cuda": 2**28})
"""Most logits held at once, by device: on CPU 64 MiB in float32, and as much for their gradient. On CUDA 1 GiB, because
each chunk adds a [V, C] product to the weight's gradient, which takes as long as several hundred rows."""


KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of logits that the kernels support."""


class Scores(NamedTuple):
    """Log-prob of each scored token and entropy of its distribution, float32 or wider."""

    logprobs: Float[Tensor, " E"]
    entropy: Float[Tensor, " E"]


def score_rows(
    rows: Float[Tensor, "R C"],
    head: nn.Module,
    targets: Int[Tensor, " E"],
    target_row: NDArray[np.int64],
    *,
    temperature: float,
    entropy_of: EntropyOf,
    vocab_size: int,
    softcap: float | None = None,
) -> Scores:
    """Score `targets[e]` with `log_softmax(capped(head(rows[target_row[e]])) / temperature)`.

    Args:
        rows: hidden states.
        head: maps hidden states to logits.
        targets: token ids, int64.
        target_row: int64 [E] on the host, the row of each target, ascending; a row may have several targets.
        temperature: divides the logits.
        entropy_of: "all" or "none".
        vocab_size: V, which determines the rows per chunk.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2); None leaves them unchanged.

    Example: one row with logits [0, 0] scores token 1 at log 0.5 = -0.693, with entropy 0.693.
    """
    if takes_kernels(head, rows, softcap):
        return Scores(*on_kernels(ThreePassScores, rows, head, targets, target_row, temperature, entropy_of))
    pieces = chunks(rows.shape[0], target_row, max_logit_rows(rows.device, vocab_size))
    of_logits = _TargetScores(targets, to_device(target_row, rows.device), entropy_of)
    return Scores(*by_chunks(rows, head, pieces, of_logits, softcap=softcap, temperature=temperature))


def by_chunks(
    rows: Float[Tensor, "R C"],
    head: nn.Module,
    pieces: tuple[RowChunk, ...],
    of_logits: OfLogits,
    *,
    softcap: float | None,
    temperature: float,
) -> tuple[Tensor, ...]:
    """Apply `of_logits` to a head's scaled logits: of all rows at once, or in chunks that keep no logits."""

    def of_chunk(own: Tensor, chunk: RowChunk) -> tuple[Tensor, ...]:
        return of_logits.on_graph(scaled_logits(head, own, softcap=softcap, temperature=temperature), chunk)

    if len(pieces) == 1:
        return of_chunk(rows, pieces[0])
    if is_plain_linear(head) and softcap is None:
        return _on_weights(LinearRows, rows, head, pieces, temperature, of_logits)  # type: ignore[no-any-return]
    parts = [checkpoint(of_chunk, rows[chunk.rows], chunk, use_reentrant=False) for chunk in pieces]
    return tuple(torch.cat(one) for one in zip(*parts, strict=True))


def takes_kernels(head: nn.Module, rows: Tensor, softcap: float | None) -> TypeGuard[nn.Linear]:
    """Return whether the kernels of a linear head can score these rows."""
    is_plain = is_plain_linear(head) and softcap is None
    return is_plain and has_kernels(rows.device) and compute_dtype(rows) in KERNEL_DTYPES and rows.shape[0] > 0


def on_kernels(
    function: type[torch.autograd.Function],
    rows: Tensor,
    head: nn.Linear,
    targets: Tensor,
    target_row: NDArray[np.int64],
    *arguments: object,
) -> Any:
    """Apply a function of `three_pass` in chunks of rows; `arguments` follow the chunks."""
    max_rows = rows_at_once(rows.device, compute_dtype(rows), head.weight.shape)
    pieces = chunks(rows.shape[0], target_row, max_rows)
    return _on_weights(function, rows, head, targets, to_device(target_row, rows.device), pieces, *arguments)


def _on_weights(function: type[torch.autograd.Function], rows: Tensor, head: nn.Linear, *arguments: object) -> Any:
    dtype = compute_dtype(rows)
    bias: Tensor | None = head.bias
    bias = None if bias is None else bias.to(dtype)
    return function.apply(rows.to(dtype), head.weight.to(dtype), bias, *arguments)  # type: ignore[no-untyped-call]


def max_logit_rows(device: torch.device, vocab_size: int) -> int:
    """Return the number of rows whose logits are held at once, at least 1.

    Example: 110 rows on CPU with 151,936 tokens, since at most 2^24 logits are held.
    """
    return max(1, MAX_LOGIT_ENTRIES.get(device.type, MAX_LOGIT_ENTRIES["cpu"]) // vocab_size)


def is_plain_linear(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether calling the module is exactly one matrix product: no subclass and no hooks."""
    return type(head) is nn.Linear and not head._forward_hooks and not head._forward_pre_hooks


def compute_dtype(rows: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer would compute here."""
    device = rows.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype


class _TargetScores(OfLogits):
    """Log-probs and entropies of targets, from the logits of a chunk."""

    def __init__(self, targets: Tensor, target_row: Tensor, entropy_of: EntropyOf) -> None:
        self._labels, self._entropy_of = (targets, target_row), entropy_of
        self._statistics: dict[int, tuple[Tensor, Tensor]] = {}

    def on_graph(self, logits: Tensor, chunk: RowChunk) -> tuple[Tensor, ...]:
        scores: tuple[Tensor, ...] = LogitScores.apply(  # type: ignore[no-untyped-call]
            logits, *chunk.labels(*self._labels), self._entropy_of
        )
        return scores

    def values(self, logits: Tensor, chunk: RowChunk) -> tuple[Tensor, ...]:
        targets, target_row = chunk.labels(*self._labels)
        picked = logits[target_row, targets]
        lse, entropy = consume_logits(logits, self._entropy_of)
        self._statistics[chunk.rows.start] = lse, entropy
        return picked - lse[target_row], entropy[target_row]

    def gradient(self, logits: Tensor, chunk: RowChunk, grads: Sequence[Tensor | None]) -> Tensor:
        lse, entropy = self._statistics[chunk.rows.start]
        own = [None if grad is None else grad[chunk.targets] for grad in grads]
        return logit_gradient(logits.sub_(lse[:, None]), entropy, *chunk.labels(*self._labels), *own)
