"""Turn `subtree_end` into a short list of rectangular attention calls that cover every visible pair exactly once.

Depth-first order makes two things contiguous: a segment, and everything that descends from it. So a long segment needs
one causal call for itself and one unmasked call for its descendants. Short segments are grouped into blocks that are
computed under a small mask. Rows after a block see only the block's keys on the path to them ("open" keys, a chain),
and the rows that see them form a staircase. A sliding window cuts segments into pieces and narrows the calls between
them. Keys of a partition above are read in place where the same queries see a long run of them; short runs are gathered
and computed together under a small mask.

    N tokens   B block length   Q query rows of a call   K keys of a call   M keys of an ancestor
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.tree.partition import QueryRanges


class Visibility(Enum):
    """Visible pairs of a call: all, those on or below the diagonal, or those in the mask."""

    FULL = "full"
    CAUSAL = "causal"
    MASKED = "masked"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionCall:
    """One rectangle of attention: queries [query_start, query_stop) against keys, with at least one key for each row.

    `keys` holds packed indices when the keys are not the range [key_start, key_stop). A masked call may have a window:
    its rows see only keys less than `window` positions before them.
    """

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    visibility: Visibility
    keys: Int64Array | None = None
    window: int | None = None

    @classmethod
    def of(
        cls, query_start: int, query_stop: int, keys: Int64Array, visibility: Visibility, window: int | None = None
    ) -> "AttentionCall":
        """Build a call from keys, ascending packed indices, which become a range if they are one."""
        is_range = int(keys[-1] - keys[0]) == keys.size - 1
        return cls(
            query_start=query_start,
            query_stop=query_stop,
            key_start=int(keys[0]),
            key_stop=int(keys[-1]) + 1,
            visibility=visibility,
            keys=None if is_range else keys,
            window=window,
        )

    def key_indices(self) -> Int64Array:
        """Return the packed indices of the keys: int64 [num_keys]."""
        return self.keys if self.keys is not None else np.arange(self.key_start, self.key_stop)

    def mask(self, ranges: QueryRanges, position: Int64Array | None = None) -> BoolArray:
        """Return the visible pairs: bool [num_queries, num_keys].

        Args:
            ranges: queries that see each key, ignoring the window.
            position: positions of the query tokens; required if the call has a window.
        """
        queries = np.arange(self.query_start, self.query_stop)[:, None]
        keys = self.key_indices()[None, :]
        visible = (ranges.first[keys] <= queries) & (queries < ranges.stop[keys])
        if self.window is None:
            return visible
        assert position is not None
        within: BoolArray = position[queries] - ranges.position[keys] < self.window
        return visible & within


MIN_CAUSAL_TOKENS = 32
"""A segment this long gets its own causal call; for shorter ones, one masked call for several is cheaper."""

MIN_CAUSAL_TOKENS_OF_SMALL = 40
"""Like `MIN_CAUSAL_TOKENS`, for a segment whose whole subtree fits into a block; there a saved call matters more."""

MAX_BLOCK_TOKENS = 128
"""Longest block of short segments; its mask has at most the square of it entries."""

MAX_WASTED_PAIRS = 2048
"""Steps of a staircase are merged under a mask while at most this many computed pairs are wasted: about one call."""


MAX_STEP_ENTRIES = 2**14
"""Most entries of a merged step's mask, so that all masks together stay O(N)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForestCalls:
    """All calls of a forest: `within` covers each query once (its own block), `across` adds keys of earlier blocks."""

    within: tuple[AttentionCall, ...]
    across: tuple[AttentionCall, ...]


def forest_calls(ranges: QueryRanges, segment_start: Int32Array, window: int | None = None) -> ForestCalls:
    """Cut a forest into calls in O(N + calls); with a window, in O(descendant rows of each block).

    Args:
        ranges: rows that see each of the forest's own tokens: itself, its descendants, and the tokens before it in an
            image that is seen whole.
        segment_start: int32 [S], first token of each segment, ascending.
        window: a query sees keys less than this many positions before it; None sees all.

    Example: a prompt of 40 tokens with two responses of 50 gives three causal calls and one unmasked call of 100
    queries against 40 keys.
    """
    subtree_end = ranges.stop
    if window is not None:
        segment_start = split_segments(segment_start, subtree_end.size, window, MIN_CAUSAL_TOKENS_OF_SMALL)
    segment_start, wholes = _apart(segment_start, ranges)
    within: list[AttentionCall] = []
    across: list[AttentionCall] = []
    for start, stop, visibility in _blocks(segment_start, subtree_end):
        if start in wholes and visibility is Visibility.CAUSAL:
            is_near = window is None or stop - start <= window
            visibility = Visibility.FULL if is_near else Visibility.MASKED
        # A causal or full block is shorter than the window, so it needs none.
        own_window = window if visibility is Visibility.MASKED else None
        within.append(AttentionCall.of(start, stop, np.arange(start, stop), visibility, own_window))
        for call in _later_calls(start, stop, subtree_end):
            across.extend([call] if window is None else narrowed(call, ranges, ranges.position, window))
    return ForestCalls(within=tuple(within), across=tuple(across))


def _apart(segment_start: Int32Array, ranges: QueryRanges) -> tuple[Int32Array, frozenset[int]]:
    """Return the segment starts with every image that is seen whole as a separate segment, and the starts of these."""
    later = np.flatnonzero(ranges.first < np.arange(ranges.first.size))
    if later.size == 0:
        return segment_start, frozenset()
    starts, last = np.unique(ranges.first[later][::-1], return_index=True)
    stops = later[::-1][last] + 1
    before = np.searchsorted(starts, segment_start, side="right") - 1
    is_inside = (before >= 0) & (segment_start > starts[before]) & (segment_start < stops[before])
    bounds = np.concatenate([segment_start[~is_inside].astype(np.int64), starts, stops[stops < ranges.first.size]])
    return np.unique(bounds).astype(np.int32), frozenset(starts.tolist())


def _blocks(segment_start: Int32Array, subtree_end: Int64Array) -> list[tuple[int, int, Visibility]]:
    """Cut [0, N) into long segments (causal) and runs of short ones (masked), in order.

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


def _later_calls(start: int, stop: int, subtree_end: Int64Array) -> list[AttentionCall]:
    """Return the calls in which tokens after a block see keys of the block."""
    ends = subtree_end[start:stop]
    if ends.min() == ends.max() > stop:
        return [AttentionCall.of(stop, int(ends[0]), np.arange(start, stop), Visibility.FULL)]
    open_keys = start + np.flatnonzero(ends > stop)
    if open_keys.size == 0:
        return []
    steps = _staircase(stop, subtree_end[open_keys])
    return [_step_call(step, open_keys) for step in steps]


class _Step(NamedTuple):
    """Rows [row_start, row_stop): at least one sees the first `num_seen` open keys, all see `num_seen_by_all`."""

    row_start: int
    row_stop: int
    num_seen: int
    num_seen_by_all: int


def _staircase(row: int, ends: Int64Array) -> list[_Step]:
    """Group rows from `row` on by how many open keys they see, merging steps that waste little; `ends` never rises."""
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


def _step_call(step: _Step, open_keys: Int64Array) -> AttentionCall:
    visibility = Visibility.FULL if step.num_seen == step.num_seen_by_all else Visibility.MASKED
    return AttentionCall.of(step.row_start, step.row_stop, open_keys[: step.num_seen], visibility)


MIN_RUN_TOKENS = 128
"""A run of keys this long is read in place; shorter ones are gathered with their neighbours."""


class _KeySpan(NamedTuple):
    """Keys [start, stop) that query rows [first, last) see."""

    start: int
    stop: int
    first: int
    last: int

    @property
    def num_rows(self) -> int:
        return self.last - self.first


def ancestor_calls(ranges: QueryRanges) -> Iterator[AttentionCall]:
    """Yield rectangles that cover the visible pairs; every row of a rectangle sees at least one key.

    Example: 200 keys that rows 0 to 9 see are one unmasked call; 2 keys that rows 0 to 9 see, followed by 1 that rows 3
    to 5 see, are one masked call of 10 rows and 3 keys.
    """
    group: list[_KeySpan] = []
    wasted = num_keys = 0
    for run in _key_runs(ranges):
        if run.stop - run.start >= MIN_RUN_TOKENS:
            yield _call_of_keys([run])
            continue
        # All rows of a group see its first run; later runs may be seen by fewer of these rows, but by no other rows.
        is_within = bool(group) and group[0].first <= run.first and run.last <= group[0].last
        more = (run.stop - run.start) * (group[0].num_rows - run.num_rows) if is_within else 0
        num_keys += run.stop - run.start
        # Rows that see all keys of the group need no mask.
        has_room = wasted + more == 0 or num_keys * group[0].num_rows <= MAX_STEP_ENTRIES
        if is_within and wasted + more <= MAX_WASTED_PAIRS and has_room:
            group.append(run)
            wasted += more
            continue
        if group:
            yield _call_of_keys(group)
        group, wasted, num_keys = [run], 0, run.stop - run.start
    if group:
        yield _call_of_keys(group)


def _key_runs(ranges: QueryRanges) -> Iterator[_KeySpan]:
    """Yield maximal runs of neighbouring keys that the same query rows see; skip keys that no row sees."""
    changes = (np.diff(ranges.first) != 0) | (np.diff(ranges.stop) != 0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), ranges.first.size]
    for start, stop in pairwise(bounds):
        if start < stop and ranges.first[start] < ranges.stop[start]:
            yield _KeySpan(start, stop, int(ranges.first[start]), int(ranges.stop[start]))


def _call_of_keys(runs: list[_KeySpan]) -> AttentionCall:
    is_full = all((run.first, run.last) == (runs[0].first, runs[0].last) for run in runs)
    keys = np.concatenate([np.arange(run.start, run.stop) for run in runs])
    return AttentionCall.of(runs[0].first, runs[0].last, keys, Visibility.FULL if is_full else Visibility.MASKED)


MAX_PIECE_TOKENS = 256
"""Longest causal piece of a segment under a window; the window's edge takes one masked square per two pieces."""

MAX_SMALL_PIECE_TOKENS = 16
"""Longest piece under a window too short for causal calls: pieces are grouped into masked blocks."""

MASKED_ROWS = 128
"""Most rows of a masked call on the window's edge."""

MIN_FULL_ROWS = 32
"""A shorter run of rows that see all keys joins the adjacent masked call."""


def split_segments(segment_start: Int32Array, num_tokens: int, window: int, min_causal: int) -> Int32Array:
    """Cut every segment into pieces that a causal call may cover: no two tokens a window apart. Return the starts.

    Example: a segment of 600 tokens under a window of 1,000 becomes pieces of 256, 256 and 88.
    """
    piece = min(window, MAX_PIECE_TOKENS) if window >= min_causal else MAX_SMALL_PIECE_TOKENS
    bounds = np.append(segment_start, num_tokens).tolist()
    pieces = [np.arange(start, stop, piece, dtype=np.int32) for start, stop in pairwise(bounds)]
    return np.concatenate([np.empty(0, np.int32), *pieces])


def narrowed(call: AttentionCall, ranges: QueryRanges, position: Int64Array, window: int) -> Iterator[AttentionCall]:
    """Yield the part of a call inside a window, as calls in which every row sees a key.

    Args:
        call: an unmasked or masked call.
        ranges: ranges of the forest or ancestor that owns the keys.
        position: int64, positions of the query tokens.
        window: size of the window in positions.

    Example: 10 keys at positions 0 to 9 are seen by rows at positions 10 to 29. A window of 8 leaves the rows at 10 to
    16, in one masked call with the keys 3 to 9.
    """
    keys = call.key_indices()
    visible = _visible_keys(call, ranges, position, window)
    sees_all = visible.num_keys == keys.size
    for start, stop in _runs(visible.num_keys > 0):
        for begin, end, full in _pieces(sees_all[start:stop], start):
            low, high = (
                (0, keys.size) if full else (int(visible.low[begin:end].min()), int(visible.high[begin:end].max()))
            )
            rows = call.query_start + begin, call.query_start + end
            visibility = Visibility.FULL if full else Visibility.MASKED
            yield AttentionCall.of(*rows, keys[low:high], visibility, None if full else window)


class _VisibleKeys(NamedTuple):
    """Keys inside the window for each row of a call: how many, and the range [low, high) that holds them."""

    num_keys: Int64Array
    low: Int64Array
    high: Int64Array


def _visible_keys(call: AttentionCall, ranges: QueryRanges, position: Int64Array, window: int) -> _VisibleKeys:
    keys = call.key_indices()
    if call.visibility is Visibility.FULL:
        rows = position[call.query_start : call.query_stop]
        low = np.searchsorted(ranges.position[keys], rows - window, side="right")
        return _VisibleKeys(num_keys=keys.size - low, low=low, high=np.full(rows.size, keys.size))
    mask = replace(call, window=window).mask(ranges, position)
    return _VisibleKeys(num_keys=mask.sum(1), low=mask.argmax(1), high=keys.size - mask[:, ::-1].argmax(1))


def _runs(flags: BoolArray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _pieces(sees_all: BoolArray, offset: int) -> Iterator[tuple[int, int, bool]]:
    """Yield rows of a run as (start, stop, unmasked): long unmasked stretches, and short masked ones between them."""
    if sees_all.all():
        yield offset, offset + sees_all.size, True
        return
    at = 0
    for start, stop in [*(run for run in _runs(sees_all) if run[1] - run[0] >= MIN_FULL_ROWS), (sees_all.size,) * 2]:
        for begin in range(at, start, MASKED_ROWS):
            yield offset + begin, offset + min(begin + MASKED_ROWS, start), False
        if start < stop:
            yield offset + start, offset + stop, True
        at = stop
