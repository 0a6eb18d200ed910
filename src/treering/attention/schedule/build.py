"""Turn `subtree_end` into a short list of rectangular attention calls that cover every visible pair exactly once.

Depth-first order makes two things contiguous: a segment, and everything that descends from it. So a long segment needs
one causal call for itself and one unmasked call for its descendants. Short segments are grouped into blocks that are
computed under a small mask; of the keys of such a block, later rows see only those on the path to them ("open" keys, a
chain), and the rows that see them form a staircase. A sliding window cuts segments into pieces and narrows the calls
between them.

    N tokens   B block length
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from treering.arrays import Int32Array, Int64Array
from treering.attention.schedule.call import Call, Visibility
from treering.attention.schedule.window import narrowed, split_segments
from treering.tree.plan.fragment import Sight

MIN_CAUSAL_TOKENS = 32
"""A segment this long gets its own causal call; for shorter ones, one masked call for several is cheaper."""

MIN_CAUSAL_TOKENS_OF_SMALL = 40
"""The same for a segment whose whole subtree fits into a block, where saving a call matters more."""

MAX_BLOCK_TOKENS = 128
"""Longest block of short segments: its mask has at most this many squared entries."""

MAX_WASTED_PAIRS = 2048
"""Steps of a staircase are merged under a mask while this many computed pairs are wasted at most: about one call."""


MAX_STEP_ENTRIES = 2**14
"""A merged step's mask has at most this many entries, so that all masks together stay O(N)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallSchedule:
    """All calls of a forest: `within` covers each query once (its own block), `across` adds keys of earlier blocks."""

    within: tuple[Call, ...]
    across: tuple[Call, ...]


def build_schedule(sight: Sight, segment_start: Int32Array, window: int | None = None) -> CallSchedule:
    """Cuts a forest into calls in O(N + calls); with a window, in O(descendant rows of each block).

    Args:
        sight: of the forest's own tokens: each is seen by itself and its descendants, in a picture that is seen whole
            also by the tokens before it there.
        segment_start: int32 [S], first token of each segment, ascending.
        window: a query sees keys less than this many positions before it; None sees all.

    Example: a prompt of 40 tokens with two responses of 50 gives three causal calls and one unmasked call of 100
    queries against 40 keys.
    """
    subtree_end = sight.stop
    if window is not None:
        segment_start = split_segments(segment_start, subtree_end.size, window, MIN_CAUSAL_TOKENS_OF_SMALL)
    segment_start, wholes = _apart(segment_start, sight)
    within: list[Call] = []
    across: list[Call] = []
    for start, stop, visibility in _blocks(segment_start, subtree_end):
        if start in wholes and visibility is Visibility.CAUSAL:
            is_near = window is None or stop - start <= window
            visibility = Visibility.FULL if is_near else Visibility.MASKED
        # A causal or full block is shorter than the window, so it needs none.
        own_window = window if visibility is Visibility.MASKED else None
        within.append(Call.of(start, stop, np.arange(start, stop), visibility, own_window))
        for call in _later_calls(start, stop, subtree_end):
            across.extend([call] if window is None else narrowed(call, sight, sight.position, window))
    return CallSchedule(within=tuple(within), across=tuple(across))


def _apart(segment_start: Int32Array, sight: Sight) -> tuple[Int32Array, frozenset[int]]:
    """Segment starts with every picture that is seen whole as a segment of its own, and the starts of these."""
    later = np.flatnonzero(sight.first < np.arange(sight.first.size))
    if later.size == 0:
        return segment_start, frozenset()
    starts, last = np.unique(sight.first[later][::-1], return_index=True)
    stops = later[::-1][last] + 1
    before = np.searchsorted(starts, segment_start, side="right") - 1
    is_inside = (before >= 0) & (segment_start > starts[before]) & (segment_start < stops[before])
    bounds = np.concatenate([segment_start[~is_inside].astype(np.int64), starts, stops[stops < sight.first.size]])
    return np.unique(bounds).astype(np.int32), frozenset(starts.tolist())


def _blocks(segment_start: Int32Array, subtree_end: Int64Array) -> list[tuple[int, int, Visibility]]:
    """Cuts [0, N) into long segments (causal) and runs of short ones (masked), in order.

    A subtree that fits into a block is not split, so that no row outside sees its keys.
    """
    num_tokens = subtree_end.size
    bounds = np.append(segment_start, num_tokens).tolist()
    subtree_ends = subtree_end[segment_start].tolist()
    blocks: list[tuple[int, int, Visibility]] = []
    open_start = 0
    for (start, stop), end in zip(pairwise(bounds), subtree_ends, strict=True):
        fits = end - start <= MAX_BLOCK_TOKENS
        if stop - start >= (MIN_CAUSAL_TOKENS_OF_SMALL if fits else MIN_CAUSAL_TOKENS):
            if open_start < start:
                blocks.append((open_start, start, Visibility.MASKED))
            blocks.append((start, stop, Visibility.CAUSAL))
            open_start = stop
        elif open_start < start and (end if fits else stop) - open_start > MAX_BLOCK_TOKENS:
            blocks.append((open_start, start, Visibility.MASKED))
            open_start = start
    if open_start < num_tokens:
        blocks.append((open_start, num_tokens, Visibility.MASKED))
    return blocks


def _later_calls(start: int, stop: int, subtree_end: Int64Array) -> list[Call]:
    """Calls in which tokens after a block see keys of the block."""
    ends = subtree_end[start:stop]
    if ends.min() == ends.max() > stop:
        return [Call.of(stop, int(ends[0]), np.arange(start, stop), Visibility.FULL)]
    open_keys = start + np.flatnonzero(ends > stop)
    if open_keys.size == 0:
        return []
    steps = _staircase(stop, subtree_end[open_keys])
    return [_step_call(step, open_keys) for step in steps]


class _Step(NamedTuple):
    """Rows [row_start, row_stop) see the first open keys: some rows `num_seen` of them, all `num_seen_by_all`."""

    row_start: int
    row_stop: int
    num_seen: int
    num_seen_by_all: int


def _staircase(row: int, ends: Int64Array) -> list[_Step]:
    """Rows from `row` on by how many open keys they see, merged while little is wasted; `ends` never rises."""
    tread_ends = np.unique(ends)
    num_seen = np.searchsorted(-ends, -tread_ends, side="right").tolist()
    steps: list[_Step] = []
    wasted = 0
    for end, seen in zip(tread_ends.tolist(), num_seen, strict=True):
        last = steps[-1] if steps else _Step(row, row, 0, 0)
        wasted += (end - row) * (last.num_seen - seen)
        num_entries = (end - last.row_start) * last.num_seen
        if steps and wasted <= MAX_WASTED_PAIRS and num_entries <= MAX_STEP_ENTRIES:
            steps[-1] = last._replace(row_stop=end, num_seen_by_all=seen)
        else:
            steps.append(_Step(row, end, seen, seen))
            wasted = 0
        row = end
    return steps


def _step_call(step: _Step, open_keys: Int64Array) -> Call:
    visibility = Visibility.FULL if step.num_seen == step.num_seen_by_all else Visibility.MASKED
    return Call.of(step.row_start, step.row_stop, open_keys[: step.num_seen], visibility)
