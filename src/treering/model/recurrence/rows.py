"""Choose rows of runs for a recurrent layer: which runs are computed together, and which states are kept.

*Forking* keeps the state after a fork: the children start from it, one level of calls later. *Rescanning* keeps no
state: each branch below recomputes the runs above the fork, in the same call. The cheapest of a family of thresholds
decides which forks keep their state.

    S runs   B rows
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from treering.model.recurrence.runs import RecurrenceRuns


class Price(NamedTuple):
    """Cost of a call and of a row of a call, in tokens, in addition to their own tokens."""

    call: int
    row: int


PRICES = {"cpu": Price(call=32, row=32), "cuda": Price(call=50_000, row=32)}
"""By type of device.

cpu: measured on one core, layers of width 256 and 768 with heads of 64, forward and backward in float32: a call costs
20 to 46 tokens, a row 23 to 41, because scans compute whole chunks of 64. cuda: the published figure of axolotl's tree
recurrence, 10 ms of host time per call against 0.2 us per token, from its own machine; it has not been measured here.
"""

MAX_GROWTH = 2.0
"""Rescanning and padding may compute at most this many times the forest's tokens, because tokens take memory."""


def price_on(device: torch.device) -> Price:
    """The price on a device; other accelerators use CUDA's.

    Example: on a CPU a call costs 32 tokens, so forking nearly always pays.
    """
    return PRICES.get(device.type, PRICES["cuda"])


THRESHOLDS = (*(float(4**power) for power in range(13)), float("inf"))
"""Thresholds in tokens above which a fork keeps its state, one per candidate schedule: from every fork to none."""

MOST_PADDING = (1.0, 0.25, 0.0)
"""Largest padding as a share of a call's real tokens; the first whose schedule fits the token bound is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceRow:
    """A chain of runs that one row of a call computes.

    Attributes:
        runs: from the first to the last.
        num_tokens: of all runs.
        above: the row whose last state it starts from, -1 if none in the forest.
        keeps: whether its last state is kept.
    """

    runs: tuple[int, ...]
    num_tokens: int
    above: int
    keeps: bool


Level = list[list[int]]
"""Calls, each a list of row numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSchedule:
    """Rows and the calls that compute them; a level starts from states of the level before."""

    rows: list[RecurrenceRow]
    levels: list[Level]

    @property
    def num_calls(self) -> int:
        """Calls of the layer, over all levels."""
        return sum(len(level) for level in self.levels)

    @property
    def num_computed(self) -> int:
        """Computed tokens, with rescanned ones and padding."""
        return sum(len(call) * self.rows[call[0]].num_tokens for level in self.levels for call in level)


def choose_schedule(runs: RecurrenceRuns, price: Price) -> RowSchedule:
    """The cheapest of a family of schedules, from "keep every fork" to "rescan everything".

    Cost is tokens plus the price of calls and rows; schedules that compute more than `MAX_GROWTH` times the forest's
    tokens are left out.

    Example: 2 branches that share 1,000 of 1,010 tokens are 2 calls of 3 rows and 1,020 tokens forked, and 1 call of 2
    rows and 2,020 tokens rescanned: forked where a call and a row cost less than 1,000 tokens.
    """
    most = MAX_GROWTH * int(runs.first[-1])

    def cost(schedule: RowSchedule) -> int:
        return schedule.num_computed + price.call * schedule.num_calls + price.row * len(schedule.rows)

    return min((_padded(make_rows(runs, kept), price.call, most) for kept in _candidates(runs, most)), key=cost)


def _padded(rows: list[RecurrenceRow], call_tokens: int, most: float) -> RowSchedule:
    """The schedule of some rows with the most padding that stays within `most` tokens."""
    schedules = (make_schedule(rows, call_tokens, padding) for padding in MOST_PADDING)
    return next(schedule for schedule in schedules if schedule.num_computed <= most)


def make_schedule(rows: list[RecurrenceRow], call_tokens: int, most_padding: float) -> RowSchedule:
    """The calls that compute some rows.

    Args:
        rows: each after the row that it starts from.
        call_tokens: padding that one call may cost before a second call is made.
        most_padding: largest padding as a share of a call's real tokens.
    """
    level_of: list[int] = []
    for row in rows:
        level_of.append(level_of[row.above] + 1 if row.above >= 0 else 0)
    by_level: list[list[int]] = [[] for _ in range(max(level_of) + 1)]
    for number, level in enumerate(level_of):
        by_level[level].append(number)
    return RowSchedule(rows=rows, levels=[_calls(rows, numbers, call_tokens, most_padding) for numbers in by_level])


def make_rows(runs: RecurrenceRuns, kept: NDArray[np.bool_]) -> list[RecurrenceRow]:
    """The rows for a choice of the runs whose last state is kept (bool [S]).

    One for each run that ends a branch or keeps its state, in packed order.
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
    """Choices of kept runs, bool [S], from every fork on, as long as no more than `most` tokens are computed.

    Two families: forks that save at least the threshold in tokens, over everything below them; and forks at least that
    many tokens after the last kept one, which thins out long chains of forks. Equal choices are yielded once.
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
    """For each run, the rows that would compute it if no fork kept its state."""
    counts = np.where(runs.num_children == 0, 1, runs.is_left.astype(np.int64)).tolist()
    parent = runs.parent.tolist()
    for run in range(runs.num_runs - 1, -1, -1):
        if parent[run] >= 0:
            counts[parent[run]] += counts[run]
    return counts  # type: ignore[no-any-return]


def _kept_at(runs: RecurrenceRuns, weight: list[int], threshold: float) -> tuple[NDArray[np.bool_], int]:
    """From the roots down: a fork keeps its state if `weight` times the tokens since the last kept one reach that.

    Returns which runs keep their state, and the tokens of all rows.
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
    """Groups rows of one level into calls, longest first, while padding is cheaper than one more call."""
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
