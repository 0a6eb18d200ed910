"""Log-probabilities and entropies of edges, computed from hidden states in chunks of rows.

An edge is (parent token -> token): the last token of a segment feeds the first token of *each* child, so rows (parents)
and edges (children) are counted apart. Never holds logits of all rows at once unless they are few.

    N tokens   R rows (parents that are scored)   E edges   V vocabulary   C hidden size
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from treering.tree.forest import Forest

MAX_LOGIT_ENTRIES = 2**25
"""Rows are scored in chunks of at most this many logits (128 MiB in float32); more than one chunk is recomputed."""

Head = Callable[[Tensor], Tensor]

EntropyOf = Literal["all", "none"]
"""Whether entropies are computed; "none" gives zeros and saves two passes over the logits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EdgeTable:
    """The edges that are scored, grouped by parent.

    Attributes:
        rows: int64 [R] packed indices of the parents, ascending.
        edges: int64 [E] packed indices of the children, ordered by parent.
        edge_row: int64 [E] number of each edge's row, ascending.
    """

    rows: NDArray[np.int64]
    edges: NDArray[np.int64]
    edge_row: NDArray[np.int64]


def edge_table(forest: Forest, wanted: NDArray[np.bool_] | None = None) -> EdgeTable:
    """The edges of a forest (all but the roots), or those of the tokens that are `wanted` (bool [N]).

    Example:
        >>> table = edge_table(Forest.from_sequences([[5, 6, 7], [5, 8]]))
        >>> table.rows.tolist(), table.edges.tolist(), table.edge_row.tolist()
        ([0, 1], [1, 3, 2], [0, 0, 1])
    """
    scored = forest.parent >= 0
    if wanted is not None:
        scored &= wanted
    edges = np.flatnonzero(scored)
    edges = edges[np.argsort(forest.parent[edges], kind="stable")]
    rows, edge_row = np.unique(forest.parent[edges], return_inverse=True)
    return EdgeTable(rows=rows.astype(np.int64), edges=edges, edge_row=edge_row.astype(np.int64))


def score_edges(
    hidden: Float[Tensor, "N C"],
    head: Head,
    forest: Forest,
    *,
    temperature: float,
    vocab_size: int,
    table: EdgeTable,
    entropy_of: EntropyOf = "all",
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probability and entropy of each scored edge, at the child's packed index; 0 elsewhere.

    `logp[t] = log_softmax(head(hidden[parent[t]]) / temperature)[tokens[t]]`, the entropy is that of the same
    distribution. Float32 or wider. Differentiable.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logprobs = torch.zeros(forest.num_tokens, dtype=wide, device=hidden.device)
    entropy = torch.zeros_like(logprobs)
    if table.edges.size == 0:
        return logprobs + 0.0 * hidden.sum(), entropy
    max_rows = max(1, MAX_LOGIT_ENTRIES // vocab_size)
    targets = forest.tokens[table.edges].astype(np.int64)
    chunks = []
    for start in range(0, table.rows.size, max_rows):
        stop = min(start + max_rows, table.rows.size)
        first, last = np.searchsorted(table.edge_row, [start, stop])
        to_device = _on(hidden.device)
        chunk = (
            hidden[to_device(table.rows[start:stop])],
            to_device(table.edge_row[first:last] - start),
            to_device(targets[first:last]),
        )
        if table.rows.size <= max_rows:
            chunks.append(_score_rows(head, temperature, entropy_of, *chunk))
        else:
            chunks.append(checkpoint(_score_rows, head, temperature, entropy_of, *chunk, use_reentrant=False))
    at = _on(hidden.device)(table.edges)
    scored_logprobs, scored_entropy = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return logprobs.index_copy(0, at, scored_logprobs), entropy.index_copy(0, at, scored_entropy)


def _score_rows(
    head: Head,
    temperature: float,
    entropy_of: EntropyOf,
    rows: Float[Tensor, "R C"],
    edge_row: Int[Tensor, " E"],
    targets: Int[Tensor, " E"],
) -> tuple[Float[Tensor, " E"], Float[Tensor, " E"]]:
    logits = head(rows)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    return _EdgeScores.apply(logits, edge_row, targets, entropy_of)  # type: ignore[no-any-return, no-untyped-call]


class _EdgeScores(torch.autograd.Function):
    """Log-probability and entropy per edge; saves the logits once instead of the chain of softmax intermediates."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, edge_row: Tensor, targets: Tensor, entropy_of: EntropyOf
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        lse = logits.logsumexp(-1)
        logprobs = logits[edge_row, targets] - lse[edge_row]
        entropy = _row_entropy(logits, lse) if entropy_of == "all" else torch.zeros_like(lse)
        ctx.save_for_backward(logits, lse, entropy, edge_row, targets)
        return logprobs, entropy[edge_row]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor, None, None, None]:
        grad_logprobs, grad_entropy = grad_outputs
        logits, lse, entropy, edge_row, targets = ctx.saved_tensors
        grad_logits = logits - lse[:, None]
        factor: Tensor | None = None
        if grad_entropy is not None:
            factor = -torch.zeros_like(lse).index_add_(0, edge_row, grad_entropy)[:, None]
            factor = factor * (grad_logits + entropy[:, None]).nan_to_num_(neginf=0.0)
        if grad_logprobs is not None:
            row_grad = torch.zeros_like(lse).index_add_(0, edge_row, grad_logprobs)[:, None]
            factor = -row_grad if factor is None else factor - row_grad
        assert factor is not None
        grad_logits.exp_().mul_(factor)
        if grad_logprobs is not None:
            grad_logits.index_put_((edge_row, targets), grad_logprobs, accumulate=True)
        return grad_logits, None, None, None


def _row_entropy(logits: Float[Tensor, "R V"], lse: Float[Tensor, " R"]) -> Float[Tensor, " R"]:
    log_weights = logits - lse[:, None]
    # A hidden token (logit -inf) has weight 0 and adds nothing: 0 * -inf must count as 0.
    return -(log_weights.exp() * log_weights.nan_to_num_(neginf=0.0)).sum(-1)


def _on(device: torch.device) -> Callable[[NDArray[np.int64]], Tensor]:
    return lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)
