"""Cuts a tree over the budget into parts: each segment becomes runs, and each run gets the label of its part.

Works from the leaves up: the connected tokens below a segment are cut off where they no longer fit. Parts with
different parents in the end are separated later, in `grouping`.

    S segments   R runs (parts of one segment, without a gap)
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from treering.arrays import BoolArray, Int64Array
from treering.tree.plan.bins import stable_order

LARGEST_FIRST = 0
"""If children do not fit together, cut the largest ones off whole until they do; no cut below a fork."""
FULL_PARTS = 1
"""If children do not fit together, cut parts of exactly the budget off their lower ends."""


class Runs(NamedTuple):
    """All tokens of a tree as runs, in packed order."""

    start: Int64Array  # [R] packed index
    stop: Int64Array  # [R]
    above: Int64Array  # [R] run of the token before its first one, -1 at the root
    label: Int64Array  # [R] equal for runs that were cut off together


class _State(NamedTuple):
    """What is not cut off yet: the upper part of each segment, as a linked list in packed order."""

    start: Int64Array  # [S] packed index
    live: Int64Array  # [S] tokens of the segment that are not cut off
    size: Int64Array  # [S] tokens in and below the segment that are not cut off
    tail: Int64Array  # [S] last segment below with a live token, or the segment itself
    before: Int64Array  # [S + 1] list links
    after: Int64Array  # [S + 1]
    runs: Int64Array  # [capacity, 4] segment, start, stop, label of what is cut off
    counts: Int64Array  # [2] runs, labels


@njit(cache=True, nogil=True)
def _open(start: Int64Array, num_tokens: int, budget: int) -> _State:
    num_segments = start.size
    live = np.empty(num_segments, np.int64)
    live[:-1] = start[1:] - start[:-1]
    live[-1] = num_tokens - start[-1]
    links = np.arange(num_segments + 1)
    max_runs = 4 * num_segments + 2 * (num_tokens // budget) + 16
    runs = np.empty((max_runs, 4), np.int64)
    return _State(start, live, live.copy(), links[:-1].copy(), links - 1, links + 1, runs, np.zeros(2, np.int64))


@njit(cache=True, nogil=True)
def _emit(state: _State, segment: int, first: int) -> None:
    """Cuts off the live tokens of a segment from number `first` on."""
    if first == state.live[segment]:
        return
    row = state.runs[state.counts[0]]
    row[0], row[3] = segment, state.counts[1]
    row[1], row[2] = state.start[segment] + first, state.start[segment] + state.live[segment]
    state.live[segment] = first
    state.counts[0] += 1


@njit(cache=True, nogil=True)
def _unlink(state: _State, first: int, last: int) -> None:
    before, after = state.before[first], state.after[last]
    if before >= 0:
        state.after[before] = after
    state.before[after] = before


@njit(cache=True, nogil=True)
def _cut_range(state: _State, first: int, last: int) -> None:
    """Cuts off all live tokens of the segments from `first` to `last`."""
    segment = first
    while segment <= last:
        _emit(state, segment, 0)
        segment = state.after[segment]
    _unlink(state, first, last)


@njit(cache=True, nogil=True)
def _trim(state: _State, top: int, num_tokens: int) -> None:
    """Cuts off the last `num_tokens` live tokens below `top`; at least one token must stay."""
    state.size[top] -= num_tokens
    while num_tokens > 0:
        tail = state.tail[top]
        taken = min(num_tokens, state.live[tail])
        num_tokens -= taken
        _emit(state, tail, state.live[tail] - taken)
        if state.live[tail] == 0:
            state.tail[top] = state.before[tail]
            _unlink(state, tail, tail)


@njit(cache=True, nogil=True)
def _cut_largest(state: _State, children: Int64Array, budget: int) -> None:
    """Cuts off children, largest first, until the rest fits. `children` are sorted by falling size."""
    total = state.size[children].sum()
    for child in children:
        if total <= budget:
            return
        total -= state.size[child]
        _cut_range(state, child, state.tail[child])
        state.counts[1] += 1


@njit(cache=True, nogil=True)
def _cut_full_parts(state: _State, children: Int64Array, budget: int) -> None:
    """Cuts off parts of exactly `budget` tokens while the children have as many; `children` are sorted by falling size.

    A part is whole children from both ends of the order, and the lower end of the smallest child that is left for the
    rest. That child is not cut again: the part below it would hang off the next part alone.
    """
    total = state.size[children].sum()
    largest, smallest = 0, children.size - 1
    while total >= budget and largest <= smallest:
        room = budget
        while largest <= smallest and state.size[children[largest]] <= room:
            room -= state.size[children[largest]]
            _cut_range(state, children[largest], state.tail[children[largest]])
            largest += 1
        while largest <= smallest and state.size[children[smallest]] <= room:
            room -= state.size[children[smallest]]
            _cut_range(state, children[smallest], state.tail[children[smallest]])
            smallest -= 1
        if room > 0 and largest <= smallest:
            _trim(state, children[smallest], room)
            smallest -= 1
            room = 0
        state.counts[1] += 1
        total -= budget - room


@njit(cache=True, nogil=True)
def _cut_segment(state: _State, segment: int, below: int, budget: int) -> None:
    """Cuts full parts off the lower end of a segment; the first includes the `below` tokens that hang off it."""
    room = budget - below
    if below + state.live[segment] > budget:
        _emit(state, segment, state.live[segment] - room)
        if below > 0:
            _cut_range(state, state.after[segment], state.tail[segment])
            state.tail[segment] = segment
        state.counts[1] += 1
        below = 0
    while state.live[segment] > budget:
        _emit(state, segment, state.live[segment] - budget)
        state.counts[1] += 1
    state.size[segment] = below + state.live[segment]


@njit(cache=True, nogil=True)
def cut_runs(
    start: Int64Array, parent: Int64Array, num_tokens: int, budget: int, policy: int, is_cut: BoolArray
) -> Runs:
    """Cuts a tree into labelled parts of at most `budget` tokens.

    Args:
        start: [S] packed index of each segment's first token; one tree in depth-first pre-order.
        parent: [S] segment above, -1 at the root.
        num_tokens: of the tree.
        budget: at least 1.
        policy: `LARGEST_FIRST` or `FULL_PARTS`.
        is_cut: [S] segments that are cut off at their upper end even if they fit.

    Example: one segment of 10 tokens and budget 4 gives runs of 2, 4 and 4 tokens.
    """
    state = _open(start, num_tokens, budget)
    num_segments = start.size
    order, first = _children(parent)
    for segment in range(num_segments - 1, -1, -1):
        children = order[first[segment] : first[segment + 1]]
        for child in children:
            if is_cut[child]:
                _cut_range(state, child, state.tail[child])
                state.counts[1] += 1
        kept = _largest_first(state, children)
        if policy == FULL_PARTS and state.size[kept].sum() > budget:
            _cut_full_parts(state, kept, budget)
            kept = _largest_first(state, kept)
        _cut_largest(state, kept, budget)
        kept = _largest_first(state, kept)
        if kept.size > 0:
            state.tail[segment] = state.tail[kept.max()]
        _cut_segment(state, segment, state.size[kept].sum(), budget)
    _cut_range(state, 0, state.tail[0])
    runs: Runs = _sorted_runs(state, parent)
    return runs


@njit(cache=True, nogil=True)
def _largest_first(state: _State, children: Int64Array) -> Int64Array:
    """The children that are not cut off whole, by falling size, ties in order."""
    kept = np.empty(children.size, np.int64)
    num_kept = 0
    for child in children:
        if state.live[child] > 0:
            kept[num_kept] = child
            num_kept += 1
    kept = kept[:num_kept]
    order: Int64Array = stable_order(-state.size[kept])
    return kept[order]


@njit(cache=True, nogil=True)
def _children(parent: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Children of each segment, one segment after another, and where each segment's begin: [S - 1] and [S + 1]."""
    first = np.zeros(parent.size + 1, np.int64)
    for above in parent:
        if above >= 0:
            first[above + 1] += 1
    first = np.cumsum(first)
    at = first.copy()
    order = np.empty(first[-1], np.int64)
    for segment in range(parent.size):
        above = parent[segment]
        if above >= 0:
            order[at[above]] = segment
            at[above] += 1
    return order, first


@njit(cache=True, nogil=True)
def _sorted_runs(state: _State, parent: Int64Array) -> Runs:
    rows = state.runs[: state.counts[0]]
    rows = rows[stable_order(rows[:, 1])]
    above = np.empty(rows.shape[0], np.int64)
    last_run = np.empty(parent.size, np.int64)
    for i in range(rows.shape[0]):
        segment = rows[i, 0]
        is_first = rows[i, 1] == state.start[segment]
        above[i] = i - 1 if not is_first else (-1 if parent[segment] < 0 else last_run[parent[segment]])
        last_run[segment] = i
    return Runs(rows[:, 1].copy(), rows[:, 2].copy(), above, rows[:, 3].copy())
