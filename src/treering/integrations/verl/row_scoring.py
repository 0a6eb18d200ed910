"""Score rows in verl's layout, computing each distinct token once.

verl concatenates rows, and the value at a token describes the next one: the log-probability of the token that follows,
and the entropy of its distribution. At the last token of a row, which no loss of verl reads, both are 0 here; verl puts
the log-probability of the next row's first token there.

    B rows   F tokens of all rows   N distinct tokens   T temperatures   E scored pairs of an edge and a temperature
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from treering.arrays import Int64Array
from treering.model.checks import check_no_hooks
from treering.model.context import tree_attention
from treering.model.edges import EdgeScores, EdgeTable, edge_table, score_edges, scored_on_head
from treering.model.forward import check_forest, check_temperature, hidden_states
from treering.model.logits import EntropyOf
from treering.model.tree_model import TreeModel
from treering.tree.forest import Forest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowScores:
    """Scores of concatenated rows; float32 or wider, differentiable.

    Attributes:
        logprobs: [F] log-probability of the token after each one, 0 at the last token of a row.
        entropy: [F] entropy in nats of the next token's distribution, 0 at the last token of a row.
    """

    logprobs: Float[Tensor, " F"]
    entropy: Float[Tensor, " F"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ScoreTables:
    """Edges to score at each temperature, and the index of each token's value.

    Attributes:
        temperatures: temperature of each table.
        tables: edges of the rows with that temperature.
        indices: int64 [F] index into the E scores of all tables; E at the last token of a row.
    """

    temperatures: tuple[float, ...]
    tables: tuple[EdgeTable, ...]
    indices: Int64Array


def score_rows_once(
    model: nn.Module,
    forest: Forest,
    temperatures: Sequence[float],
    *,
    entropy_of: EntropyOf = "all",
) -> RowScores:
    """Compute each distinct token once, and score each edge once per temperature of its rows.

    Args:
        model: a supported causal language model, sharded by `fully_shard` or whole.
        forest: of the B rows, in order; at least one row has two tokens.
        temperatures: positive temperature of each row.
        entropy_of: as in `treering.forward`.

    Raises:
        InputError: a token outside the vocabulary, or a temperature that is not positive.
        UnsupportedError: a model that would not be exact.

    Example: rows [1, 2, 3] and [1, 2, 4] compute 4 tokens; at temperatures 1 and 2 the edge from 1 to 2 has two values.
    """
    bound = TreeModel.of(model)
    check_no_hooks(bound)
    check_forest(forest, bound)
    wanted_scores = _score_tables(forest, temperatures)
    with tree_attention(bound):
        hidden = hidden_states(bound, forest)
    scores = scored_on_head(bound, lambda head, rows: _scored(rows, head, wanted_scores, bound, entropy_of), hidden)
    at = torch.from_numpy(wanted_scores.indices).to(hidden.device)
    logprobs, entropy = (torch.cat([x, x.new_zeros(1)])[at] for x in (scores.logprobs, scores.entropy))
    return RowScores(logprobs=logprobs, entropy=entropy)


def _scored(
    hidden: Tensor, head: nn.Module, wanted_scores: _ScoreTables, model: TreeModel, entropy_of: EntropyOf
) -> EdgeScores:
    """Return the scores of all tables, concatenated, from one call of a sharded head."""
    scores = [
        score_edges(model, hidden, head, temperature=temperature, table=table, entropy_of=entropy_of)
        for temperature, table in zip(wanted_scores.temperatures, wanted_scores.tables, strict=True)
    ]
    return EdgeScores(
        logprobs=torch.cat([score.logprobs for score in scores]),
        entropy=torch.cat([score.entropy for score in scores]),
    )


def _score_tables(forest: Forest, temperatures: Sequence[float]) -> _ScoreTables:
    for temperature in temperatures:
        check_temperature(temperature)
    of_row = np.asarray(temperatures, np.float64)
    paths, offsets = forest.paths()
    row_of_token = np.repeat(np.arange(forest.num_branches), np.diff(offsets))
    indices = np.full(paths.size, -1, np.int64)
    tables: list[EdgeTable] = []
    distinct = np.unique(of_row)
    num_scored = 0
    for temperature in distinct:
        of_this = of_row[row_of_token] == temperature
        wanted = np.zeros(forest.num_tokens, bool)
        wanted[paths[of_this]] = True
        table = edge_table(forest, wanted)
        own = np.flatnonzero(of_this)
        indices[own] = num_scored + table.edge_of_token(forest)[paths[own]]
        tables.append(table)
        num_scored += table.edges.size
    # A token's value is that of the edge to the next token.
    indices = np.append(indices[1:], num_scored)
    indices[offsets[1:] - 1] = num_scored
    return _ScoreTables(temperatures=tuple(distinct.tolist()), tables=tuple(tables), indices=indices)
