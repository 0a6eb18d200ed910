"""Which rows score which edges of a forest, and the results at their packed places.

An edge is (parent token -> token): the last token of a segment feeds the first token of *each* child, so rows (parents)
and edges (children) are counted apart. Knows forests; how a row is scored is `scoring`'s.

    N tokens   R rows (parents that are scored)   E edges   C hidden size
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from treering.model.logits import EntropyOf
from treering.model.scoring import Scores, score_rows
from treering.tree.forest import Forest


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
    head: nn.Module,
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
    to_device = _on(hidden.device)
    scores: Scores = score_rows(
        hidden[to_device(table.rows)],
        head,
        to_device(forest.tokens[table.edges].astype(np.int64)),
        to_device(table.edge_row),
        temperature=temperature,
        entropy_of=entropy_of,
        vocab_size=vocab_size,
    )
    at = to_device(table.edges)
    return logprobs.index_copy(0, at, scores.logprobs), entropy.index_copy(0, at, scores.entropy)


def _on(device: torch.device) -> Callable[[NDArray[np.int64]], Tensor]:
    return lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)
