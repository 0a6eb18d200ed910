"""Choose how a recurrent layer computes a forest: its runs, the rows of each call, and the index tensors of all calls.

A state can be read only at the end of a row of a call. So a forest is cut into *runs*, which end at forks and where
partitions below need the state. *Forking* keeps the state after a fork: the children start from it, one level of calls
later. *Rescanning* keeps no state: each branch below recomputes the runs above the fork, in the same call. The cheapest
of a family of thresholds decides which forks keep their state.

    N tokens   S runs   B rows of a call   L tokens of its longest row
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.attention import TreeLayout
from treering.attention.layout import to_device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecurrenceRuns:
    """Runs of a forest in packed order.

    Attributes:
        first: int64 [S + 1] first token of each run, then N.
        parent: int64 [S] the parent run, -1 for none.
        start: int64 [S] index of the state of the partition above from which the run starts, -1 for none.
        num_children: int64 [S].
        is_left: bool [S] whether a partition below needs the state after the run's last token.
    """

    first: Int64Array
    parent: Int64Array
    start: Int64Array
    num_children: Int64Array
    is_left: BoolArray

    @property
    def length(self) -> Int64Array:
        """Number of tokens of each run, [S]."""
        return np.diff(self.first)

    @property
    def num_runs(self) -> int:
        """S."""
        return self.parent.size


def find_runs(parent: Int32Array, start: Int64Array, left: Int64Array) -> RecurrenceRuns:
    """Cut a forest into runs.

    Args:
        parent: int32 [N], parents of the forest.
        start: int64 [N] index of the state from above from which a token starts, -1 for none.
        left: int64, ascending: tokens whose state partitions below need.

    Example: the runs of the branches 5, 6, 7 and 5, 6, 8 are [5, 6], [7] and [8]. If the state of token 0 is needed
        below,
    there are four: [5], [6], [7] and [8].
    """
    num_tokens = parent.size
    num_children = np.bincount(parent[parent >= 0], minlength=num_tokens)
    is_last = num_children != 1
    is_last[left] = True
    is_first = (parent != np.arange(-1, num_tokens - 1)) | (parent < 0)
    is_first[1:] |= is_last[:-1]
    first = np.flatnonzero(is_first)
    run_of = np.cumsum(is_first) - 1
    above = parent[first].astype(np.int64)
    last = np.append(first[1:], num_tokens) - 1
    needed = np.zeros(num_tokens, bool)
    needed[left] = True
    return RecurrenceRuns(
        first=np.append(first, num_tokens),
        parent=np.where(above < 0, -1, run_of[above]),
        start=start[first],
        num_children=num_children[last],
        is_left=needed[last],
    )


class Price(NamedTuple):
    """Cost of a call and of a row of a call, in tokens, in addition to their own tokens."""

    call: int
    row: int


PRICES = {"cpu": Price(call=32, row=32), "cuda": Price(call=50_000, row=32)}
"""Prices by device type.

cpu: measured on one core, layers of width 256 and 768 with heads of 64, forward and backward in float32: a call costs
20 to 46 tokens, a row 23 to 41, because scans compute whole chunks of 64. cuda: from the published figure of axolotl's
tree recurrence, 10 ms of host time per call against 0.2 us per token on its machine; not measured here.
"""

MAX_GROWTH = 2.0
"""Bound on the tokens computed with rescanning and padding, over the forest's tokens, because tokens take memory."""


def price_on(device: torch.device) -> Price:
    """Return the price on a device; other accelerators use CUDA's.

    Example: on a CPU a call costs 32 tokens, so forking nearly always pays.
    """
    return PRICES.get(device.type, PRICES["cuda"])


THRESHOLDS = (*(float(4**power) for power in range(13)), float("inf"))
"""Thresholds in tokens above which a fork keeps its state, one per candidate batching: from every fork to none."""

MOST_PADDING = (1.0, 0.25, 0.0)
"""Largest padding as a share of a call's real tokens; the first whose batching fits the token bound is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceRow:
    """Chain of runs that one row of a call computes.

    Attributes:
        runs: indices of the runs, from first to last.
        num_tokens: tokens of all runs.
        above: index of the row from whose last state this one starts, -1 if it is not in the forest.
        keeps: whether its last state is kept.
    """

    runs: tuple[int, ...]
    num_tokens: int
    above: int
    keeps: bool


Level = list[list[int]]
"""Calls, each a list of row indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatching:
    """Rows and the calls that compute them; a level starts from states of the level before."""

    rows: list[RecurrenceRow]
    levels: list[Level]

    @property
    def num_calls(self) -> int:
        """Number of calls of the layer, over all levels."""
        return sum(len(level) for level in self.levels)

    @property
    def num_computed(self) -> int:
        """Number of computed tokens, with rescanned tokens and padding."""
        return sum(len(call) * self.rows[call[0]].num_tokens for level in self.levels for call in level)


def choose_batching(runs: RecurrenceRuns, price: Price) -> RowBatching:
    """Return the cheapest of a family of batchings, from "keep every fork" to "rescan everything".

    The cost is tokens plus the price of calls and rows; batchings that compute more than `MAX_GROWTH` times the
    forest's tokens are dropped.

    Example: for 2 branches that share 1,000 of 1,010 tokens, forking takes 2 calls, 3 rows and 1,020 tokens, rescanning
        1
    call, 2 rows and 2,020 tokens; forking is chosen if a call and a row cost less than 1,000 tokens.
    """
    most = MAX_GROWTH * int(runs.first[-1])

    def cost(batching: RowBatching) -> int:
        return batching.num_computed + price.call * batching.num_calls + price.row * len(batching.rows)

    return min((_padded(make_rows(runs, kept), price.call, most) for kept in _candidates(runs, most)), key=cost)


def _padded(rows: list[RecurrenceRow], call_tokens: int, most: float) -> RowBatching:
    """Return the batching of some rows with the most padding that stays within `most` tokens."""
    batchings = (make_batching(rows, call_tokens, padding) for padding in MOST_PADDING)
    return next(batching for batching in batchings if batching.num_computed <= most)


def make_batching(rows: list[RecurrenceRow], call_tokens: int, most_padding: float) -> RowBatching:
    """Group rows into the calls that compute them.

    Args:
        rows: rows, each after the row from which it starts.
        call_tokens: padding that one call may cost before a second call is made.
        most_padding: largest padding as a share of a call's real tokens.
    """
    level_of: list[int] = []
    for row in rows:
        level_of.append(level_of[row.above] + 1 if row.above >= 0 else 0)
    by_level: list[list[int]] = [[] for _ in range(max(level_of) + 1)]
    for number, level in enumerate(level_of):
        by_level[level].append(number)
    return RowBatching(rows=rows, levels=[_calls(rows, numbers, call_tokens, most_padding) for numbers in by_level])


def make_rows(runs: RecurrenceRuns, kept: NDArray[np.bool_]) -> list[RecurrenceRow]:
    """Return the rows for a choice of runs whose last state is kept (bool [S]).

    There is one row for each run that ends a branch or keeps its state, in packed order.
    """
    row_of: dict[int, int] = {}
    rows: list[RecurrenceRow] = []
    length, parent, keeps = runs.length.tolist(), runs.parent.tolist(), kept.tolist()
    for run in np.flatnonzero(kept | (runs.num_children == 0)).tolist():
        chain = [run]
        while parent[chain[-1]] >= 0 and not keeps[parent[chain[-1]]]:
            chain.append(parent[chain[-1]])
        above = parent[chain[-1]]
        row_of[run] = len(rows)
        rows.append(
            RecurrenceRow(
                runs=tuple(reversed(chain)),
                num_tokens=sum(length[i] for i in chain),
                above=row_of[above] if above >= 0 else -1,
                keeps=keeps[run],
            )
        )
    return rows


def _candidates(runs: RecurrenceRuns, most: float) -> Iterator[NDArray[np.bool_]]:
    """Yield choices of kept runs, bool [S], from every fork on, while at most `most` tokens are computed.

    Two families: forks that save at least the threshold in tokens, over everything below them; and forks at least that
    many tokens after the last kept fork, which thins out long chains of forks. Equal choices are yielded once.
    """
    seen: set[bytes] = set()
    for weight in ([num_rows - 1 for num_rows in _num_rows_below(runs)], [1] * runs.num_runs):
        for threshold in THRESHOLDS:
            kept, num_computed = _kept_at(runs, weight, threshold)
            if num_computed > most:
                break
            if kept.tobytes() not in seen:
                seen.add(kept.tobytes())
                yield kept


def _num_rows_below(runs: RecurrenceRuns) -> list[int]:
    """Return, for each run, the number of rows that would compute it if no fork kept its state."""
    counts = np.where(runs.num_children == 0, 1, runs.is_left.astype(np.int64)).tolist()
    parent = runs.parent.tolist()
    for run in range(runs.num_runs - 1, -1, -1):
        if parent[run] >= 0:
            counts[parent[run]] += counts[run]
    return counts  # type: ignore[no-any-return]


def _kept_at(runs: RecurrenceRuns, weight: list[int], threshold: float) -> tuple[NDArray[np.bool_], int]:
    """Choose, from the roots down, forks where `weight` times the tokens since the last kept fork reach `threshold`.

    Return which runs keep their state, and the tokens of all rows.
    """
    parent, length, num_children = runs.parent.tolist(), runs.length.tolist(), runs.num_children.tolist()
    kept, since = runs.is_left.tolist(), [0] * runs.num_runs
    num_computed = 0
    for run, above in enumerate(parent):
        since[run] = length[run] + (since[above] if above >= 0 and not kept[above] else 0)
        if num_children[run] > 1 and weight[run] * since[run] >= threshold:
            kept[run] = True
        if kept[run] or num_children[run] == 0:
            num_computed += since[run]
    return np.array(kept, bool), num_computed


def _calls(rows: list[RecurrenceRow], numbers: list[int], call_tokens: int, most_padding: float) -> Level:
    """Group rows of one level into calls, longest first, while padding is cheaper than one more call."""
    calls: Level = []
    longest = wasted = real = 0
    for number in sorted(numbers, key=lambda i: -rows[i].num_tokens):
        length = rows[number].num_tokens
        if calls and wasted + longest - length <= min(call_tokens, most_padding * (real + length)):
            calls[-1].append(number)
            wasted, real = wasted + longest - length, real + length
            continue
        calls.append([number])
        longest, wasted, real = length, 0, length
    return calls


MIN_LENGTH = 2
"""Least padded length of rows: layers treat a call of one token as generation, and update states without gradients."""

_CALLS = "recurrence"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowCall:
    """One call of a recurrent layer: rows of tokens, each with its own initial state.

    Attributes:
        tokens: int64 [B, L] packed indices, padded on the right.
        padding: bool [B, L], True past the end of a row; None if no row that keeps its state is padded.
        start: int64 [B] index of each row's initial state among the states kept by the level before; in the first
            level, among the boundary's states, or -1 for all rows.
        kept: int64, indices of the rows whose last state is kept.
        length: int64 [B] number of tokens of each row.
    """

    tokens: Tensor
    padding: Tensor | None
    start: Tensor
    kept: Tensor
    length: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecurrenceCalls:
    """All calls of one recurrent layer on one forest.

    Attributes:
        levels: calls by level; the first level starts from states of the partition above.
        source: int64 [N] index of each token's output in the concatenated outputs of all calls.
        left: int64 [R] index of the state after each boundary token among the kept states of all calls.
    """

    levels: tuple[tuple[RowCall, ...], ...]
    source: Tensor
    left: Tensor


def calls_of(layout: TreeLayout) -> RecurrenceCalls:
    """Return the calls of a layout, built on first use.

    Example: for the branches 5, 6, 7 and 5, 6, 8 on a CPU, one call computes the rows 5, 6, 7 and 5, 6, 8: two tokens
    are rescanned, which is cheaper than a second call.
    """
    return layout.once(_CALLS, lambda: make_calls(layout, price_on(layout.device)))


def make_calls(layout: TreeLayout, price: Price) -> RecurrenceCalls:
    """Return the cheapest calls at a price; if calls and rows are free, every fork keeps its state."""
    runs = runs_of(layout)
    return index_calls(layout, runs, choose_batching(runs, price))


def runs_of(layout: TreeLayout) -> RecurrenceRuns:
    """Return the runs of a layout's forest, cut where partitions below need a state."""
    forest, boundary = layout.forest, layout.boundary
    nothing = np.empty(0, np.int64)
    start = np.full(forest.num_tokens, -1) if boundary is None else boundary.start
    return find_runs(forest.parent, start, nothing if boundary is None else boundary.left)


def index_calls(layout: TreeLayout, runs: RecurrenceRuns, batching: RowBatching) -> RecurrenceCalls:
    """Return the index tensors of a batching."""
    source = np.full(layout.forest.num_tokens, -1)
    index_in_level, index = _kept_indices(batching)
    levels: list[tuple[RowCall, ...]] = []
    num_computed = 0
    for level in batching.levels:
        calls = []
        for numbers in level:
            rows = [batching.rows[number] for number in numbers]
            tokens, length = _as_array([_tokens(row, runs) for row in rows])
            _put_sources(source, tokens, num_computed)
            num_computed += tokens.size
            start = [index_in_level[row.above] if row.above >= 0 else int(runs.start[row.runs[0]]) for row in rows]
            kept = [i for i, row in enumerate(rows) if row.keeps]
            calls.append(_call(tokens, length, np.array(start), np.array(kept, np.int64), layout.device))
        levels.append(tuple(calls))
    assert (source >= 0).all(), "a token that no row computes"
    left = np.array([index[run] for run in np.flatnonzero(runs.is_left).tolist()], np.int64)
    return RecurrenceCalls(
        levels=tuple(levels),
        source=to_device(source, layout.device),
        left=to_device(left, layout.device),
    )


def _kept_indices(batching: RowBatching) -> tuple[dict[int, int], dict[int, int]]:
    """Return indices of each row's kept state within its level, and of the state after each run among all kept."""
    in_level: dict[int, int] = {}
    overall: dict[int, int] = {}
    for level in batching.levels:
        kept = [number for call in level for number in call if batching.rows[number].keeps]
        in_level.update(zip(kept, range(len(kept)), strict=True))
        for number in kept:
            overall[batching.rows[number].runs[-1]] = len(overall)
    return in_level, overall


def _tokens(row: RecurrenceRow, runs: RecurrenceRuns) -> NDArray[np.int64]:
    return np.concatenate([np.arange(runs.first[run], runs.first[run + 1]) for run in row.runs])


def _as_array(rows: list[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return rows as one array [B, L], each padded with its last token, and their lengths."""
    length = np.array([row.size for row in rows])
    tokens = np.empty((len(rows), max(MIN_LENGTH, int(length.max()))), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : row.size], tokens[i, row.size :] = row, row[-1]
    return tokens, length


def _put_sources(source: NDArray[np.int64], tokens: NDArray[np.int64], offset: int) -> None:
    """Record where each token is first computed; rescanned tokens keep their first index.

    The first index is never padding, which repeats a token after its own position.
    """
    found, first = np.unique(tokens, return_index=True)
    is_new = source[found] < 0
    source[found[is_new]] = offset + first[is_new]


def _call(
    tokens: NDArray[np.int64],
    length: NDArray[np.int64],
    start: NDArray[np.int64],
    kept: NDArray[np.int64],
    device: torch.device,
) -> RowCall:
    padding = np.arange(tokens.shape[1]) >= length[:, None]
    tensors = (to_device(array, device) for array in (tokens, start, kept, length))
    on_device = dict(zip(("tokens", "start", "kept", "length"), tensors, strict=True))
    needs_padding = padding[kept].any()
    return RowCall(**on_device, padding=to_device(padding, device) if needs_padding else None)
