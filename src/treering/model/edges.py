"""Score the edges of a forest: which rows score which tokens, and their log-probs from the head in bounded memory.

An edge is (parent token -> token): the last token of a segment predicts the first token of *each* child, so rows
(parents) and edges (children) are counted separately.

Four implementations compute the same scores. On CUDA a linear head runs on kernels that touch its logits three times.
Elsewhere: all rows at once, saving their logits; a linear head in chunks of rows, recomputing logits in the backward
and summing the weight gradient in place; any other head in checkpointed chunks.

    N tokens   R rows (parents that are scored)   E edges   V vocabulary   C hidden size
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, TypeGuard

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from treering.attention.layout import to_device
from treering.errors import InputError
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
from treering.model.tree_model import TreeModel
from treering.tree.forest import Forest

MAX_LOGIT_ENTRIES = MappingProxyType({"cpu": 2**24, "cuda": 2**28})
"""Most logits held at once, by device: on CPU 64 MiB in float32, and as much for their gradient. On CUDA 1 GiB, because
each chunk adds a [V, C] product to the weight's gradient, which takes as long as several hundred rows."""

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of logits that the kernels support."""


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
    model: TreeModel, score: Callable[[nn.Module, Tensor], EdgeScores], hidden: Float[Tensor, "N C"]
) -> EdgeScores:
    """Return `score(head, hidden)` with the model's head, gathered if it is sharded."""
    if model.shards is None:
        return score(model.head, hidden)
    names = [field.name for field in fields(EdgeScores)]

    def as_tuple(head: nn.Module, rows: Tensor) -> tuple[Tensor | None, ...]:
        scores = score(head, rows)
        return tuple(getattr(scores, name) for name in names)

    return EdgeScores(**dict(zip(names, model.shards.on_head(as_tuple, hidden), strict=True)))


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
    order = np.argsort(owner, kind="stable")
    return np.split(items[order], np.searchsorted(owner[order], np.arange(1, num_owners)))


def score_edges(
    model: TreeModel,
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
    and bounded as in the model. The entropy is that of the same distribution; the value is the value head's
    there. `head` is the model's head, gathered if it is sharded.

    Raises:
        InputError: a value head that does not return one number per row.
    """
    if table.edges.size == 0:
        nothing = 0.0 * hidden[:0].sum(-1).to(torch.promote_types(hidden.dtype, torch.float32))
        return EdgeScores(logprobs=nothing, entropy=nothing, values=None if value_head is None else nothing)
    device = hidden.device
    rows = hidden[to_device(table.rows, device)]
    scores = score_rows(
        rows,
        head,
        to_device(table.targets, device),
        table.edge_row,
        temperature=temperature * model.logit_divisor,
        entropy_of=entropy_of,
        vocab_size=model.vocab_size,
        softcap=model.softcap,
    )
    if value_head is None:
        return scores
    return replace(scores, values=_values(rows, value_head)[to_device(table.edge_row, device)])


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
) -> EdgeScores:
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
        logprobs, entropy = on_kernels(ThreePassScores, rows, head, targets, target_row, temperature, entropy_of)
        return EdgeScores(logprobs=logprobs, entropy=entropy)
    pieces = chunks(rows.shape[0], target_row, max_logit_rows(rows.device, vocab_size))
    of_logits = _TargetScores(targets, to_device(target_row, rows.device), entropy_of)
    logprobs, entropy = by_chunks(rows, head, pieces, of_logits, softcap=softcap, temperature=temperature)
    return EdgeScores(logprobs=logprobs, entropy=entropy)


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
