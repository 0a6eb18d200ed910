"""Where a context belongs in an index's sorted positions, and how many tokens it shares with one of them.

N entries of a text   K keys
"""

import numpy as np

from treering.arrays import Int32Array, Int64Array
from treering.history.store.prompt_index import MARKER
from treering.lean import kernel, lean

KEY_BITS = 4
"""Every 16th position of an order has a key."""
MAX_LENGTH = 48
"""Longest match that is measured."""
LONG_ENOUGH = 16
"""Matches of this length are not extended past an edit."""
MAX_EDIT = 16
_WHOLE = 8
"""Added to the length of a match that reaches back to the beginning of the rollout: it is the whole context."""


@lean
def _key(last: int, before: int) -> int:
    return (last << 32) + (before + 1 if last != MARKER else 0)


@kernel
def write_keys(text: Int32Array, order: Int32Array, keys: Int64Array) -> None:
    """Writes a key for every 16th position, from its last two entries and in their order, to narrow searches by.

    A key is the last entry times 2**32, plus the one before + 1, or plus 0 if the last is a marker.

    Args:
        text: int32 [N], begins with a marker.
        order: int32 [N].
        keys: int64 [K], K = ceil(N / 16), written.

    Example: with a text of -1, 7, 5 and the order 0, 2, 1 there is one key, that of the marker: -2**32.
    """
    for k in range(keys.size):
        at = order[k << KEY_BITS]
        keys[k] = _key(text[at], text[at - 1] if text[at] != MARKER else MARKER)


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


@lean
def agree(text: Int32Array, at: int, context: Int32Array, last: int, begin: int, most: int) -> int:
    """How many entries up to text[at] equal the context's up to `last`; before `begin` the context has a marker."""
    if at < 0 or (last >= begin and text[np.uintp(at)] != context[np.uintp(last)]):
        return 0
    # A text begins with a marker, which equals no token; the last bound is for contexts with invalid token ids.
    limit = min(most, last - begin + 1, at + 1)
    count = 0
    while count < limit and text[np.uintp(at - count)] == context[np.uintp(last - count)]:
        count += 1
    if count == last - begin + 1 and count < most and count <= at and text[at - count] == MARKER:
        count += 1
    return count


@lean(inline=False)
def agree_after_edit(text: Int32Array, at: int, context: Int32Array, last: int, begin: int) -> int:
    """The most entries that agree after skipping one token of the text, of the context, or of both."""
    best = agree(text, at, context, last - 1, begin, MAX_EDIT)
    # A marker is not skipped: the text before it belongs to another rollout.
    if at >= 0 and text[at] >= 0:
        best = max(best, agree(text, at - 1, context, last - 1, begin, MAX_EDIT))
        best = max(best, agree(text, at - 1, context, last, begin, MAX_EDIT))
    return int(best)


@lean
def measure(text: Int32Array, at: int, context: Int32Array, begin: int) -> tuple[int, int]:
    """(length, edit) of the match that ends at text[at]."""
    num_equal = agree(text, at, context, context.size - 1, begin, MAX_LENGTH)
    length, edit = with_edit(text, at, context, begin, num_equal)
    return length, edit


@lean
def with_edit(text: Int32Array, at: int, context: Int32Array, begin: int, length: int) -> tuple[int, int]:
    """`measure` for a known number of equal entries."""
    last = context.size - 1
    if length < MAX_LENGTH and last - length == begin - 2:
        return length + _WHOLE, 0
    if length >= LONG_ENOUGH:
        return length, 0
    return length, agree_after_edit(text, at - length, context, last - length, begin)
