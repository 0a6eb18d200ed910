"""Sliding windows: narrow rectangles of visible pairs to those less than the window apart.

The keys of an unmasked call lie on one path, shallow ones first, so a window only moves each row's first visible key.
The mask of a masked call is small and is evaluated directly.

    Q query rows of a call   K keys of a call
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.attention.schedule.call import Call, Visibility
from treering.tree.plan.fragment import Sight

MAX_PIECE_TOKENS = 256
"""Longest causal piece of a segment under a window; the window's edge takes one masked square per two pieces."""

MAX_SMALL_PIECE_TOKENS = 16
"""The same under a window too short for causal calls: pieces are grouped into masked blocks."""

MASKED_ROWS = 128
"""Most rows of a masked call on the window's edge."""

MIN_FULL_ROWS = 32
"""A shorter run of rows that see all keys joins the adjacent masked call."""


def split_segments(segment_start: Int32Array, num_tokens: int, window: int, min_causal: int) -> Int32Array:
    """Segment starts with every segment cut into pieces that a causal call may cover: no two tokens a window apart.

    Example: a segment of 600 tokens under a window of 1,000 becomes pieces of 256, 256 and 88.
    """
    piece = min(window, MAX_PIECE_TOKENS) if window >= min_causal else MAX_SMALL_PIECE_TOKENS
    bounds = np.append(segment_start, num_tokens).tolist()
    pieces = [np.arange(start, stop, piece, dtype=np.int32) for start, stop in pairwise(bounds)]
    return np.concatenate([np.empty(0, np.int32), *pieces])


def narrowed(call: Call, sight: Sight, position: Int64Array, window: int) -> Iterator[Call]:
    """The part of a call inside a window, as calls in which every row sees a key.

    Args:
        call: unmasked or masked.
        sight: of the forest or ancestor that owns the keys.
        position: int64, of the query tokens.
        window: in positions.

    Example: 10 keys at positions 0 to 9, seen by rows at positions 10 to 29, leave under a window of 8 the rows at 10
    to 16, in one masked call of the keys 3 to 9.
    """
    keys = call.key_indices()
    seen = _seen(call, sight, position, window)
    sees_all = seen.num_keys == keys.size
    for start, stop in _runs(seen.num_keys > 0):
        for begin, end, full in _pieces(sees_all[start:stop], start):
            low, high = (0, keys.size) if full else (int(seen.low[begin:end].min()), int(seen.high[begin:end].max()))
            rows = call.query_start + begin, call.query_start + end
            visibility = Visibility.FULL if full else Visibility.MASKED
            yield Call.of(*rows, keys[low:high], visibility, None if full else window)


class _Seen(NamedTuple):
    """For each row of a call its keys inside the window: how many, and the range [low, high) that holds them."""

    num_keys: Int64Array
    low: Int64Array
    high: Int64Array


def _seen(call: Call, sight: Sight, position: Int64Array, window: int) -> _Seen:
    keys = call.key_indices()
    if call.visibility is Visibility.FULL:
        rows = position[call.query_start : call.query_stop]
        low = np.searchsorted(sight.position[keys], rows - window, side="right")
        return _Seen(num_keys=keys.size - low, low=low, high=np.full(rows.size, keys.size))
    mask = replace(call, window=window).mask(sight, position)
    return _Seen(num_keys=mask.sum(1), low=mask.argmax(1), high=keys.size - mask[:, ::-1].argmax(1))


def _runs(flags: BoolArray) -> list[tuple[int, int]]:
    """Maximal runs of true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _pieces(sees_all: BoolArray, offset: int) -> Iterator[tuple[int, int, bool]]:
    """Rows of a run as (start, stop, unmasked): long unmasked stretches, and masked ones of bounded length between."""
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
