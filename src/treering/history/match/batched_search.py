"""Binary searches of several rows' contexts in sorted text positions, run in lockstep.

Nearly every step of a binary search waits for memory. The steps of one search depend on each other, those of different
rows do not, so their memory accesses overlap.

    Q searches
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import Int32Array, Int64Array
from treering.history.jit import Memory, prefetch
from treering.history.match.arena import Histories
from treering.history.match.suffix_search import KEY_BITS, is_before, key_at, last_with_key
from treering.lean import lean

MAX_QUERIES = 16
"""Searches per batch."""
_NUM_PREFETCHED = 8
_MAX_PREFETCHED = 24


class BatchedSearch(NamedTuple):
    """Buffers for the searches of some rows."""

    rows: Int64Array  # [Q]
    ends: Int64Array  # [Q], of the context
    begins: Int64Array  # [Q], of the rollout in it
    starts: Int64Array  # [Q], of the index's text
    sizes: Int64Array  # [Q], entries of the order
    first_keys: Int64Array  # [Q]
    keys: Int64Array  # [Q], searched for
    left: Int64Array  # [Q], keys that may still be the first one not below
    lows: Int64Array  # [Q], bounds of the number of positions that sort before the context; equal in the end
    highs: Int64Array  # [Q]


BATCHED_SEARCH = Memory(BatchedSearch, **dict.fromkeys(BatchedSearch._fields, (np.int64, MAX_QUERIES)))
"""Buffers for the searches of any rows."""


@lean
def add_query(
    queries: BatchedSearch,
    q: int,
    tokens: Int32Array,
    row: int,
    end: int,
    begin: int,
    start: int,
    size: int,
    first_key: int,
) -> None:
    """Sets what a search looks for, and where."""
    queries.rows[q], queries.ends[q], queries.begins[q] = row, end, begin
    queries.starts[q], queries.sizes[q], queries.first_keys[q] = start, size, first_key
    queries.left[q] = (size + (1 << KEY_BITS) - 1) >> KEY_BITS
    queries.keys[q] = key_at(tokens[row], end - 1, begin)


@lean
def add_history_query(
    queries: BatchedSearch, q: int, tokens: Int32Array, row: int, end: int, begin: int, history: Histories, slot: int
) -> None:
    """`add_query` in a prompt's history."""
    start, size = history.spans[slot]
    add_query(queries, q, tokens, row, end, begin, start, size, (start >> KEY_BITS) + slot)


@lean
def run_queries(
    queries: BatchedSearch, num: int, tokens: Int32Array, text: Int32Array, order: Int32Array, keys: Int64Array,
    positions: Int32Array,
) -> None:  # fmt: skip
    """Runs the first `num` searches in one index or arena in lockstep.

    Afterwards `lows` holds how many positions sort before each context.
    """
    starts, sizes, lows, highs = queries.starts, queries.sizes, queries.lows, queries.highs
    _narrow(queries, num, keys)
    for q in range(num):
        k, from_key, size = lows[q], queries.first_keys[q], sizes[q]
        num_keys = (size + (1 << KEY_BITS) - 1) >> KEY_BITS
        lows[q] = ((k - 1) << KEY_BITS) + 1 if k > 0 else 0
        k = last_with_key(keys, from_key, k, num_keys, queries.keys[q])
        highs[q] = min(k << KEY_BITS, size)
        prefetch(order, starts[q] + lows[q])
        prefetch(order, starts[q] + highs[q])
    _halve(queries, num, tokens, text, order)
    for q in range(num):
        for i in range(starts[q] + lows[q], starts[q] + highs[q]):
            prefetch(text, starts[q] + order[i])
    for q in range(num):
        while lows[q] < highs[q]:
            _step(queries, q, tokens, text, order)
        start, right = starts[q], lows[q]
        for k in range(start + max(right - _NUM_PREFETCHED, 0), start + min(right + _NUM_PREFETCHED, sizes[q])):
            prefetch(text, start + order[k])
            prefetch(positions, start + order[k])


@lean
def _halve(queries: BatchedSearch, num: int, tokens: Int32Array, text: Int32Array, order: Int32Array) -> None:
    """Narrows the searches with many positions left: those whose last two tokens are frequent."""
    starts, lows, highs = queries.starts, queries.lows, queries.highs
    widest = 0
    for q in range(num):
        widest = max(widest, highs[q] - lows[q])
    while widest > _MAX_PREFETCHED:
        for q in range(num):
            prefetch(order, starts[q] + ((lows[q] + highs[q]) >> 1))
        for q in range(num):
            if highs[q] - lows[q] > _MAX_PREFETCHED:
                prefetch(text, starts[q] + order[starts[q] + ((lows[q] + highs[q]) >> 1)])
        for q in range(num):
            if highs[q] - lows[q] > _MAX_PREFETCHED:
                _step(queries, q, tokens, text, order)
        widest >>= 1


@lean
def _step(queries: BatchedSearch, q: int, tokens: Int32Array, text: Int32Array, order: Int32Array) -> None:
    """Halves a search's range by comparing with the text."""
    start, middle = queries.starts[q], (queries.lows[q] + queries.highs[q]) >> 1
    context = tokens[queries.rows[q], : queries.ends[q]]
    if is_before(text, start + order[start + middle], context, queries.begins[q]):
        queries.lows[q] = middle + 1
    else:
        queries.highs[q] = middle


@lean
def _narrow(queries: BatchedSearch, num: int, keys: Int64Array) -> None:
    """Writes to `lows` how many keys are below each search's key."""
    lows, left, wanted, firsts = queries.lows, queries.left, queries.keys, queries.first_keys
    longest = 0
    for q in range(num):
        lows[q] = 0
        longest = max(longest, left[q])
    last = keys.size - 1
    while longest > 0:
        for q in range(num):
            half, is_open = left[q] >> 1, left[q] > 0
            # Branchless: a branch would be mispredicted every other time.
            is_below = is_open & (keys[np.uintp(min(firsts[q] + lows[q] + half, last))] < wanted[q])
            lows[q] += is_below * (half + 1)
            left[q] = left[q] - half - 1 if is_below else half
        longest >>= 1
