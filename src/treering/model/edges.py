"""Map the edges of a forest to the rows that score them, and scatter the scores to packed indices.

An edge is (parent token -> token): the last token of a segment predicts the first token of *each* child, so rows
(parents) and edges (children) are counted separately.

    N tokens   R rows (parents that are scored)   E edges   C hidden size
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from treering.attention.layout import to_device
from treering.errors import InputError
from treering.model.logits import EntropyOf
from treering.model.scoring import Scores, on_kernels, score_rows
from treering.model.three_pass import ThreePassLoss
from treering.model.tree_model import TreeModel
from treering.tree.forest import Forest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EdgeTable:
    """Scored edges, grouped by parent.

    Attributes:
        rows: int64 [R] indices of the parents among the hidden states, ascending.
        edges: int64 [E] packed indices of the children, ordered by parent.
        edge_row: int64 [E] index of each edge's row, ascending.
        targets: int64 [E] token that each edge scores: the child, or any other token if `edges` are only numbers.
    """

    rows: NDArray[np.int64]
    edges: NDArray[np.int64]
    edge_row: NDArray[np.int64]
    targets: NDArray[np.int64]

    def edge_of_token(self, forest: Forest) -> NDArray[np.int64]:
        """Return the index of each token's edge in the table: int64 [N], -1 for tokens without one."""
        edge_of_token = np.full(forest.num_tokens, -1, np.int64)
        edge_of_token[self.edges] = np.arange(self.edges.size)
        return edge_of_token


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EdgeScores:
    """Scores of some edges, float32 or wider, differentiable.

    Attributes:
        logprobs: [E] log-prob of each edge's token given its path.
        entropy: [E] entropy in nats of the distribution that the token was scored with.
        values: [E] the value head's output at the state before the token; None without a value head.
        divergence: [E] divergence from a teacher at the state before the token; None without a teacher.
    """

    logprobs: Float[Tensor, " E"]
    entropy: Float[Tensor, " E"]
    values: Float[Tensor, " E"] | None = None
    divergence: Float[Tensor, " E"] | None = None


LossOf = Callable[[slice, EdgeScores], Tensor]
"""(consecutive edges of a table, their scores) -> their part of a loss, a scalar."""


def scored_on_head(
    parts: TreeModel, score: Callable[[nn.Module, Tensor], EdgeScores], hidden: Float[Tensor, "N C"]
) -> EdgeScores:
    """Return `score(head, hidden)` with the model's head, gathered if it is sharded."""
    if parts.shards is None:
        return score(parts.head, hidden)
    names = [field.name for field in fields(EdgeScores)]

    def as_tuple(head: nn.Module, rows: Tensor) -> tuple[Tensor | None, ...]:
        scores = score(head, rows)
        return tuple(getattr(scores, name) for name in names)

    return EdgeScores(**dict(zip(names, parts.shards.on_head(as_tuple, hidden), strict=True)))


def edge_table(forest: Forest, wanted: NDArray[np.bool_] | None = None) -> EdgeTable:
    """Return the edges of a forest (all but roots and images), or only those of the `wanted` tokens (bool [N]).

    Example:
        >>> table = edge_table(Forest.from_sequences([[5, 6, 7], [5, 8]]))
        >>> table.rows.tolist(), table.edges.tolist(), table.edge_row.tolist()
        ([0, 1], [1, 3, 2], [0, 0, 1])
    """
    scored = forest.parent >= 0
    if forest.images:
        scored &= forest.tokens >= 0
    if wanted is not None:
        scored &= wanted
    edges = np.flatnonzero(scored)
    edges = edges[np.argsort(forest.parent[edges], kind="stable")]
    rows, edge_row = np.unique(forest.parent[edges], return_inverse=True)
    return EdgeTable(
        rows=rows.astype(np.int64),
        edges=edges,
        edge_row=edge_row.astype(np.int64),
        targets=forest.tokens[edges].astype(np.int64),
    )


def split_table(
    table: EdgeTable, owner: NDArray[np.int64], local_index: NDArray[np.int64], num_owners: int
) -> list[EdgeTable]:
    """Split a table by partition of the tree: each gets its rows and the edges of their children in any partition.

    So the first token of a child is scored in the partition that has its parent's last hidden state.

    Args:
        table: table of the whole tree.
        owner: [N] partition of each token.
        local_index: [N] index of each token among its partition's tokens; ascending within a partition.
        num_owners: number of partitions.

    Example: for the chain 5, 6, 7 cut after 6, the first partition gets edges 1 and 2, and the second none.
    """
    row_owner = owner[table.rows]
    edge_owner = row_owner[table.edge_row]
    rows = _grouped(table.rows, row_owner, num_owners)
    edges = _grouped(table.edges, edge_owner, num_owners)
    parents = _grouped(table.rows[table.edge_row], edge_owner, num_owners)
    targets = _grouped(table.targets, edge_owner, num_owners)
    return [
        EdgeTable(
            rows=local_index[rows[i]],
            edges=edges[i],
            edge_row=np.searchsorted(rows[i], parents[i]),
            targets=targets[i],
        )
        for i in range(num_owners)
    ]


def _grouped(items: NDArray[np.int64], owner: NDArray[np.int64], num_owners: int) -> list[NDArray[np.int64]]:
    """Group items by owner, each group in the given order."""
    order = np.argsort(owner, kind="stable")
    return np.split(items[order], np.searchsorted(owner[order], np.arange(1, num_owners)))


def score_edges(
    parts: TreeModel,
    hidden: Float[Tensor, "N C"],
    head: nn.Module,
    *,
    temperature: float,
    table: EdgeTable,
    entropy_of: EntropyOf = "all",
    value_head: nn.Module | None = None,
) -> EdgeScores:
    """Return the log-prob, entropy and value of each edge of the table, in its order.

    `logp[e] = log_softmax(logits / temperature)[targets[e]]` with `logits = head(hidden[rows[edge_row[e]]])`, divided
    and bounded as in the model (`parts`). The entropy is that of the same distribution; the value is the value head's
    there. `head` is the model's head, gathered if it is sharded.

    Raises:
        InputError: a value head that does not return one number per row.
    """
    if table.edges.size == 0:
        nothing = 0.0 * hidden[:0].sum(-1).to(torch.promote_types(hidden.dtype, torch.float32))
        return EdgeScores(logprobs=nothing, entropy=nothing, values=None if value_head is None else nothing)
    device = hidden.device
    rows = hidden[to_device(table.rows, device)]
    scores: Scores = score_rows(
        rows,
        head,
        to_device(table.targets, device),
        table.edge_row,
        temperature=temperature * parts.logit_divisor,
        entropy_of=entropy_of,
        vocab_size=parts.vocab_size,
        softcap=parts.softcap,
    )
    values = None if value_head is None else _values(rows, value_head)[to_device(table.edge_row, device)]
    return EdgeScores(logprobs=scores.logprobs, entropy=scores.entropy, values=values)


def loss_on_kernels(
    parts: TreeModel,
    hidden: Float[Tensor, "N C"],
    head: nn.Linear,
    loss_of: LossOf,
    *,
    temperature: float,
    table: EdgeTable,
    entropy_of: EntropyOf,
) -> Tensor:
    """Return the sum of `loss_of` over all edges of a table, in parts, for a head that runs on kernels.

    The gradient of each part is taken while its logits exist, so they are computed once and never kept. For arguments,
    see `score_edges`.
    """
    rows = hidden[to_device(table.rows, hidden.device)]
    targets = to_device(table.targets, hidden.device)

    def of_part(at: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
        return loss_of(at, EdgeScores(logprobs=logprobs, entropy=entropy))

    options = temperature * parts.logit_divisor, entropy_of, of_part
    loss: Tensor = on_kernels(ThreePassLoss, rows, head, targets, table.edge_row, *options)
    return loss


def _values(rows: Float[Tensor, "R C"], value_head: nn.Module) -> Float[Tensor, " R"]:
    weight = next(value_head.parameters(), rows)
    autocast = torch.is_autocast_enabled(rows.device.type)
    values: Tensor = value_head(rows if autocast else rows.to(weight.dtype))
    if values.shape not in ((rows.shape[0],), (rows.shape[0], 1)):
        raise InputError(
            f"a value head must give one number per hidden row, [{rows.shape[0]}, 1], got {list(values.shape)}; use "
            f"nn.Linear({rows.shape[1]}, 1)"
        )
    return values.reshape(-1).to(torch.promote_types(values.dtype, torch.float32))
