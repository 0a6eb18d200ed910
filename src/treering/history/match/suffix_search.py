"""Where contexts belong in an index's sorted positions, and the walk outwards from there, the best matches first.

Several contexts are searched in lockstep. Nearly every step of a binary search waits for memory; the steps of one
search depend on each other, those of different rows do not, so their accesses overlap.

    N entries of a text   K keys   Q searches
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import Int32Array, Int64Array
from treering.compiling.lean import lean
from treering.history.jit import Memory, prefetch
from treering.history.match.matches import MAX_LENGTH, agree
from treering.history.store.prompt_index import MARKER

KEY_BITS = 4
"""Every 16th position of an order has a key."""


@lean
def _key(last: int, before: int) -> int:
    return (last << 32) + (before + 1 if last != MARKER else 0)


def keys_of(text: Int32Array, order: Int32Array) -> Int64Array:
    """A key for every 16th position, from its last two entries and in their order, to narrow searches by: int64 [K].

    A key is the last entry times 2**32, plus the one before + 1, or plus 0 if the last is a marker.

    Args:
        text: int32 [N], begins with a marker.
        order: int32 [N].

    Example: with a text of -1, 7, 5 and the order 0, 2, 1 there is one key, that of the marker: -2**32.
    """
    at = order[:: 1 << KEY_BITS]
    last = text[at].astype(np.int64)
    return (last << 32) + np.where(last != MARKER, text[at - 1].astype(np.int64) + 1, 0)


@lean
def key_at(context: Int32Array, last: int, begin: int) -> int:
    """The key of a context up to `last`; before `begin` it has a marker."""
    token = context[last] if last >= begin else MARKER
    return int(_key(token, context[last - 1] if last > begin else MARKER))


@lean
def last_with_key(keys: Int64Array, first: int, k: int, num_keys: int, key: int) -> int:
    """How many of the keys from `first` on are at most `key`, given that `k` of them are below it."""
    low, step = k, 1
    while low + step <= num_keys and keys[first + low + step - 1] == key:
        low += step
        step <<= 1
    while step > 0:
        if low + step <= num_keys and keys[first + low + step - 1] == key:
            low += step
        step >>= 1
    return low


@lean
def is_before(text: Int32Array, at: int, context: Int32Array, begin: int) -> bool:
    """Whether the text up to text[at] sorts before a context, both read backwards.

    Args:
        text: int32.
        at: a position in it.
        context: int32 [n].
        begin: where the rollout begins in the context; a marker stands before it.
    """
    last, count = context.size - 1, 0
    while True:
        position = last - count
        wanted = context[np.uintp(position)] if position >= begin else MARKER
        found = text[np.uintp(at - count)]
        if found != wanted or wanted == MARKER or count == MAX_LENGTH:
            return bool(found < wanted)
        count += 1


class Sides(NamedTuple):
    """The next positions to the left and right, and the length of each match; -1 is not measured yet."""

    left: int
    right: int
    left_length: int
    right_length: int


@lean
def sides_of(right: int) -> Sides:
    """The sides of a context that so many positions sort before."""
    return Sides(right - 1, right, -1, -1)


@lean
def next_match(
    sides: Sides, text: Int32Array, order: Int32Array, start: int, context: Int32Array, begin: int
) -> tuple[int, int, Sides]:
    """The next longest match: its position in the text, its length, and the sides after it.

    A length of 0 means that no match is left, and the position is meaningless. Of equally long matches the right one
    comes first.

    Args:
        sides: of the context.
        text: int32.
        order: int32 [N], positions from `start` of the text on.
        start: where the index's text begins.
        context: int32 [n].
        begin: where the rollout begins in it.
    """
    left, right, left_length, right_length = sides
    last = context.size - 1
    if left_length < 0:
        left_length = agree(text, start + order[np.uintp(left)], context, last, begin, MAX_LENGTH) if left >= 0 else 0
    if right_length < 0:
        right_length = (
            agree(text, start + order[np.uintp(right)], context, last, begin, MAX_LENGTH) if right < order.size else 0
        )
    if left_length > right_length:
        return start + order[left], left_length, Sides(left - 1, right, -1, right_length)
    if right_length == 0:
        return -1, 0, Sides(left, right, left_length, right_length)
    return start + order[right], right_length, Sides(left, right + 1, left_length, -1)


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
