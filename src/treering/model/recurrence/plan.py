"""The plan of a forest for recurrent layers: index tensors for every call, built once and read by every such layer.

For each call: which tokens to gather, which states to start from, which to keep, and where the outputs go.

    N tokens   B rows of a call   L tokens of its longest row
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.attention import TreeLayout
from treering.attention.to_device import to_device
from treering.model.recurrence.rows import Price, RecurrenceRow, RowSchedule, choose_schedule, price_on
from treering.model.recurrence.runs import RecurrenceRuns, find_runs

MIN_LENGTH = 2
"""Rows are padded to this: layers treat a call of one token as generation and update states without gradients."""

_PLAN = "recurrence"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowCall:
    """One call of a recurrent layer: rows of tokens, each with its own initial state.

    Attributes:
        tokens: int64 [B, L] packed indices, padded on the right.
        padding: bool [B, L], True past the end of a row; None if no row that keeps its state is padded.
        start: int64 [B] index of each row's initial state among the states kept by the level before; in the first
            level, among the boundary's states, or -1 for all rows.
        kept: int64, the rows whose last state is kept.
        length: int64 [B] tokens of each row.
    """

    tokens: Tensor
    padding: Tensor | None
    start: Tensor
    kept: Tensor
    length: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecurrencePlan:
    """All calls of one recurrent layer on one forest.

    Attributes:
        levels: calls by level; the first level starts from states of the partition above.
        source: int64 [N] index of each token's output in the concatenated outputs of all calls.
        left: int64 [R] index of the state after each boundary token among the kept states of all calls.
    """

    levels: tuple[tuple[RowCall, ...], ...]
    source: Tensor
    left: Tensor


def plan_of(layout: TreeLayout) -> RecurrencePlan:
    """The plan of a layout, built on first use.

    Example: for the branches 5, 6, 7 and 5, 6, 8 on a CPU one call computes the rows 5, 6, 7 and 5, 6, 8: two tokens
    are rescanned, which is cheaper than a second call.
    """
    return layout.once(_PLAN, lambda: make_plan(layout, price_on(layout.device)))


def make_plan(layout: TreeLayout, price: Price) -> RecurrencePlan:
    """The cheapest plan at a price: free calls and rows keep every fork's state, otherwise some forks are rescanned."""
    runs = runs_of(layout)
    return plan_schedule(layout, runs, choose_schedule(runs, price))


def runs_of(layout: TreeLayout) -> RecurrenceRuns:
    """The runs of a layout's forest, cut where partitions below need a state."""
    forest, boundary = layout.forest, layout.boundary
    nothing = np.empty(0, np.int64)
    start = np.full(forest.num_tokens, -1) if boundary is None else boundary.start
    return find_runs(forest.parent, start, nothing if boundary is None else boundary.left)


def plan_schedule(layout: TreeLayout, runs: RecurrenceRuns, schedule: RowSchedule) -> RecurrencePlan:
    """The index tensors of a schedule."""
    source = np.full(layout.forest.num_tokens, -1)
    place_in_level, place = _kept_places(schedule)
    levels: list[tuple[RowCall, ...]] = []
    num_computed = 0
    for level in schedule.levels:
        calls = []
        for numbers in level:
            rows = [schedule.rows[number] for number in numbers]
            tokens, length = _padded([_tokens(row, runs) for row in rows])
            _put_sources(source, tokens, num_computed)
            num_computed += tokens.size
            start = [place_in_level[row.above] if row.above >= 0 else int(runs.start[row.runs[0]]) for row in rows]
            kept = [i for i, row in enumerate(rows) if row.keeps]
            calls.append(_call(tokens, length, np.array(start), np.array(kept, np.int64), layout.device))
        levels.append(tuple(calls))
    assert (source >= 0).all(), "a token that no row computes"
    left = np.array([place[run] for run in np.flatnonzero(runs.is_left).tolist()], np.int64)
    return RecurrencePlan(
        levels=tuple(levels),
        source=to_device(source, layout.device),
        left=to_device(left, layout.device),
    )


def _kept_places(schedule: RowSchedule) -> tuple[dict[int, int], dict[int, int]]:
    """Index of each row's kept state within its level, and of the state after each run among all kept states."""
    in_level: dict[int, int] = {}
    overall: dict[int, int] = {}
    for level in schedule.levels:
        kept = [number for call in level for number in call if schedule.rows[number].keeps]
        in_level.update(zip(kept, range(len(kept)), strict=True))
        for number in kept:
            overall[schedule.rows[number].runs[-1]] = len(overall)
    return in_level, overall


def _tokens(row: RecurrenceRow, runs: RecurrenceRuns) -> NDArray[np.int64]:
    return np.concatenate([np.arange(runs.first[run], runs.first[run + 1]) for run in row.runs])


def _padded(rows: list[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows as one array [B, L], each padded with its last token, and their lengths."""
    length = np.array([row.size for row in rows])
    tokens = np.empty((len(rows), max(MIN_LENGTH, int(length.max()))), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : row.size], tokens[i, row.size :] = row, row[-1]
    return tokens, length


def _put_sources(source: NDArray[np.int64], tokens: NDArray[np.int64], offset: int) -> None:
    """Records where each token is first computed; rescanned tokens keep their first index.

    That is never padding, which repeats a token after its own position.
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
