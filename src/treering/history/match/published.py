"""Published rollouts as flat sorted texts that one compiled call searches: of the running prompts, and of others.

A running prompt's index is copied once, when the prompt first appears; no step copies an amount that grows with the
history. The text of other prompts depends only on the snapshot, so that a resumed run drafts like the original one.
Several contexts are searched in lockstep, because nearly every step of a binary search waits for memory. The steps of
one search depend on each other but those of different rows do not, so their accesses overlap.

    N entries of a text   K keys   Q searches
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from treering.arrays import Int32Array, Int64Array
from treering.compiling.lean import lean
from treering.history.features import FAR, HISTORY, OTHERS, shift_bucket
from treering.history.jit import Memory, prefetch
from treering.history.match.matches import (
    IN_HISTORY,
    IN_OTHERS,
    LONG_ENOUGH,
    MAX_LENGTH,
    Matches,
    agree,
    agree_after_edit,
    put,
    with_edit,
)
from treering.history.store.history_reader import newest_first
from treering.history.store.prompt_index import MARKER, PromptIndex, check_entries, sort_contexts
from treering.types import PromptId

KEY_BITS = 4
"""Every 16th position of an order has a key."""


@lean
def _key(last: int, before: int) -> int:
    return (last << 32) + (before + 1 if last != MARKER else 0)


def keys_of(text: Int32Array, order: Int32Array) -> Int64Array:
    """Return a key for every 16th position, from its last two entries and in their order: int64 [K].

    Keys narrow searches. A key is the last entry times 2**32, plus the one before + 1, or + 0 if the last is a marker.

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
    """Return the key of a context up to `last`; before `begin` it has a marker."""
    token = context[last] if last >= begin else MARKER
    return int(_key(token, context[last - 1] if last > begin else MARKER))


@lean
def last_with_key(keys: Int64Array, first: int, k: int, num_keys: int, key: int) -> int:
    """Return how many of the keys from `first` on are at most `key`, given that `k` of them are below it."""
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
    """Return whether the text up to text[at] sorts before a context, both read backwards.

    Args:
        text: int32 text.
        at: a position in the text.
        context: int32 [n].
        begin: where the rollout begins in the context; before it, the context counts as a marker.
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
    """Next positions to the left and right, and the length of each match; -1 if not measured yet."""

    left: int
    right: int
    left_length: int
    right_length: int


@lean
def sides_of(right: int) -> Sides:
    """Return the sides of a context that `right` positions sort before."""
    return Sides(right - 1, right, -1, -1)


@lean
def next_match(
    sides: Sides, text: Int32Array, order: Int32Array, start: int, context: Int32Array, begin: int
) -> tuple[int, int, Sides]:
    """Return the next longest match: its position in the text, its length, and the sides after it.

    A length of 0 means that no match is left, and the position is meaningless. Ties go to the right side.

    Args:
        sides: sides of the context.
        text: int32 text.
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
    """Set the context of search `q` and the index to search."""
    queries.rows[q], queries.ends[q], queries.begins[q] = row, end, begin
    queries.starts[q], queries.sizes[q], queries.first_keys[q] = start, size, first_key
    queries.left[q] = (size + (1 << KEY_BITS) - 1) >> KEY_BITS
    queries.keys[q] = key_at(tokens[row], end - 1, begin)


@lean
def run_queries(
    queries: BatchedSearch, num: int, tokens: Int32Array, text: Int32Array, order: Int32Array, keys: Int64Array,
    positions: Int32Array,
) -> None:  # fmt: skip
    """Run the first `num` searches in one index or arena in lockstep.

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
    """Narrow the searches with many positions left, whose last two tokens are frequent."""
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
    start, middle = queries.starts[q], (queries.lows[q] + queries.highs[q]) >> 1
    context = tokens[queries.rows[q], : queries.ends[q]]
    if is_before(text, start + order[start + middle], context, queries.begins[q]):
        queries.lows[q] = middle + 1
    else:
        queries.highs[q] = middle


@lean
def _narrow(queries: BatchedSearch, num: int, keys: Int64Array) -> None:
    """Write to `lows` the number of keys that are below each search's key."""
    lows, left, wanted, firsts = queries.lows, queries.left, queries.keys, queries.first_keys
    longest = 0
    for q in range(num):
        lows[q] = 0
        longest = max(longest, left[q])
    last = keys.size - 1
    while longest > 0:
        for q in range(num):
            half, is_open = left[q] >> 1, left[q] > 0
            # Without a branch, which would be mispredicted every other time.
            is_below = is_open & (keys[np.uintp(min(firsts[q] + lows[q] + half, last))] < wanted[q])
            lows[q] += is_below * (half + 1)
            left[q] = left[q] - half - 1 if is_below else half
        longest >>= 1


_PADDING = 2

_NOTHING: Mapping[PromptId, PromptIndex] = MappingProxyType({})


class Histories(NamedTuple):
    """The arrays of an `Arena`, for compiled calls."""

    spans: Int64Array
    text: Int32Array
    order: Int32Array
    keys: Int64Array
    positions: Int32Array


class Arena:
    """Texts and sorted positions of prompts, one after another in memory.

    Attributes:
        text: int32, the texts; a marker follows the last one.
        order: int32, aligned with the texts; positions count from the start of the prompt's text.
        keys: int64, see `keys_of`; a slot's keys begin at start // 16 + slot.
        positions: int32, aligned with the texts: entries since the marker of the rollout.
        spans: int64 [slots, 2], start and size of each slot; size 0 for a prompt without history.

    Example: prompts with texts of 3 and 5 entries have the spans [0, 3] and [3, 5].
    """

    def __init__(self) -> None:
        self._snapshot = _NOTHING
        self._slots: dict[PromptId, int] = {}
        self._num_used = 0
        self.text = np.full(_PADDING, MARKER, np.int32)
        self.order = np.zeros(0, np.int32)
        self.keys = np.zeros(1, np.int64)
        self.positions = np.zeros(0, np.int32)
        self.spans = np.zeros((0, 2), np.int64)

    @property
    def arrays(self) -> Histories:
        """Arrays for compiled calls."""
        return Histories(self.spans, self.text, self.order, self.keys, self.positions)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    def slots(self, prompt_ids: Sequence[PromptId], snapshot: Mapping[PromptId, PromptIndex]) -> Int64Array:
        """Return the slot of each prompt, int64 [B]; missing prompts are added from the snapshot."""
        if snapshot is not self._snapshot:
            self._clear(snapshot)
        found = list(map(self._slots.get, prompt_ids))
        if None in found:
            self._add(dict.fromkeys(prompt_ids))
            found = [self._slots[prompt_id] for prompt_id in prompt_ids]
        return np.array(found, np.int64)

    def forget(self) -> None:
        """Remove all prompts; the arena then grows as a new one would."""
        self._clear(_NOTHING)

    def _clear(self, snapshot: Mapping[PromptId, PromptIndex]) -> None:
        self._snapshot = snapshot
        self._slots = {}
        self._num_used = 0

    def _add(self, prompt_ids: Mapping[PromptId, None]) -> None:
        indexes = {prompt_id: self._snapshot.get(prompt_id) for prompt_id in prompt_ids}
        sizes = {prompt_id: 0 if index is None else index.text.size for prompt_id, index in indexes.items()}
        # Most prompts no longer run, and copying the running ones again costs less than keeping the others.
        if self._num_used > 2 * sum(sizes.values()) or len(self._slots) > 2 * len(sizes):
            self._clear(self._snapshot)
        new = [prompt_id for prompt_id in prompt_ids if prompt_id not in self._slots]
        self._reserve(self._num_used + sum(sizes[prompt_id] for prompt_id in new), len(self._slots) + len(new))
        for prompt_id in new:
            self._append(prompt_id, indexes[prompt_id])

    def _append(self, prompt_id: PromptId, index: PromptIndex | None) -> None:
        slot, start = len(self._slots), self._num_used
        size = 0 if index is None else index.text.size
        self._slots[prompt_id] = slot
        self.spans[slot] = start, size
        if index is None or size == 0:
            return
        part = slice(start, start + size)
        self.text[part], self.order[part] = index.text, index.order
        self.keys[_keys_at(start, size, slot)] = keys_of(index.text, index.order)
        self.positions[part] = positions_of(index.text)
        self._num_used += size
        self.text[self._num_used : self._num_used + _PADDING] = MARKER

    def _reserve(self, num_entries: int, num_slots: int) -> None:
        """Make room for at least `num_entries` and `num_slots`; grow by a quarter or more."""
        check_entries(
            num_entries + _PADDING, "the history of the running prompts", "run fewer prompts at a time, or keep fewer "
            "versions (max_epochs)",
        )  # fmt: skip
        capacity = self.order.size
        if num_entries > capacity:
            more = max(num_entries, capacity + capacity // 4) - capacity
            self.text = np.append(self.text, np.full(more, MARKER, np.int32))
            more_zeros = np.zeros(more, np.int32)
            self.order, self.positions = np.append(self.order, more_zeros), np.append(self.positions, more_zeros)
        num_keys = (num_entries >> KEY_BITS) + num_slots
        if num_keys > self.keys.size:
            self.keys = np.append(self.keys, np.zeros(num_keys - self.keys.size + self.keys.size // 4, np.int64))
        if num_slots > self.spans.shape[0]:
            grown = np.zeros((max(num_slots, 2 * self.spans.shape[0]), 2), np.int64)
            grown[: self.spans.shape[0]] = self.spans
            self.spans = grown


def _keys_at(start: int, size: int, slot: int) -> slice:
    first = (start >> KEY_BITS) + slot
    return slice(first, first + -(-size >> KEY_BITS))


def positions_of(text: Int32Array) -> Int32Array:
    """Return the position of each entry in its rollout, int32: entries since the rollout's marker.

    Example: the text -1, 7, 5, -1, 7 has the positions 0, 1, 2, 0, 1.
    """
    at = np.arange(text.size, dtype=np.int32)
    return at - np.maximum.accumulate(np.where(text == MARKER, at, 0))


class Others(NamedTuple):
    """The arrays of a `Recent`, for compiled calls."""

    text: Int32Array
    order: Int32Array
    keys: Int64Array


class Recent:
    """Newest published rollouts, one prompt after another, each prompt's newest version first.

    Prompts with the newest versions come first; ties go to the prompt that was added last.

    Attributes:
        text: int32 [N + 1], the texts and a marker.
        order: int32 [N], positions sorted by their contexts; see `PromptIndex`.
        keys: int64 [ceil(N / 16)], see `keys_of`.

    Example: prompts "a" with [5, 6] and "b" with [7] give the text -1, 7, -1, 5, 6, -1, where "b" has the span
    from 0 to 2 and "a" the one from 2 to 5.
    """

    def __init__(self, max_tokens: int) -> None:
        """Keep at most `max_tokens` entries."""
        self._max_tokens = max_tokens
        self._spans: dict[PromptId, tuple[int, int]] = {}
        self._snapshot: Mapping[PromptId, PromptIndex] | None = None
        self._fill([])

    @property
    def arrays(self) -> Others:
        """Arrays for compiled calls."""
        return Others(self.text, self.order, self.keys)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    def spans(self, prompt_ids: Sequence[PromptId]) -> Int64Array:
        """Return where each prompt's rollouts begin and end, int64 [B, 2]; 0, 0 for a prompt that is not included."""
        found = [self._spans.get(prompt_id, (0, 0)) for prompt_id in prompt_ids]
        return np.array(found, np.int64).reshape(len(found), 2)

    def take(self, snapshot: Mapping[PromptId, PromptIndex]) -> None:
        """Read a snapshot, unless it is the latest one read or `max_tokens` is 0."""
        if snapshot is self._snapshot or self._max_tokens == 0:
            return
        self._snapshot = snapshot
        texts: list[Int32Array] = []
        self._spans = {}
        num_left = self._max_tokens
        for prompt_id in newest_first(snapshot):
            if num_left <= 0:
                break
            text = snapshot[prompt_id].text[:num_left]
            begin = self._max_tokens - num_left
            self._spans[prompt_id] = begin, begin + text.size
            texts.append(text)
            num_left -= text.size
        self._fill(texts)

    def _fill(self, texts: list[Int32Array]) -> None:
        self.text = np.concatenate([*texts, np.array([MARKER], np.int32)])
        self.order = sort_contexts(self.text[:-1], np.argsort(self.text[:-1], kind="stable"))
        self.keys = keys_of(self.text, self.order)


_MAX_MATCHES = 12
_FEW_MATCHES = 8
_MAX_LOOKS = 48
_MAX_OTHERS = 6
_WEAK, _ENOUGH_STRONG = 3, 4
"""Matches shorter than a third of the longest are skipped once there are four."""


@lean
def add_history_query(
    queries: BatchedSearch, q: int, tokens: Int32Array, row: int, end: int, begin: int, history: Histories, slot: int
) -> None:
    """Add a search for a row's context in its prompt's history; see `add_query`."""
    start, size = history.spans[slot]
    add_query(queries, q, tokens, row, end, begin, start, size, (start >> KEY_BITS) + slot)


@lean
def find_in_history(
    matches: Matches, num: int, history: Histories, slot: int, context: Int32Array, begin: int, right: int
) -> int:
    """Add the longest matches of the row's context in its prompt's index, longest first.

    Args:
        matches: written from `num` on.
        num: matches so far.
        history: arrays of the running prompts.
        slot: slot of the row's prompt.
        context: int32 [n], the row's tokens.
        begin: where the rollout begins.
        right: number of the index's positions that sort before the context.

    Returns:
        The new number of matches.
    """
    start, size = history.spans[slot]
    if size == 0:
        return num
    text, order = history.text, history.order[start : start + size]
    sides = sides_of(right)
    first, most, longest = num, num + _MAX_MATCHES, 0
    for _ in range(_MAX_LOOKS):
        at, num_equal, sides = next_match(sides, text, order, start, context, begin)
        if num_equal == 0:
            break
        length, edit = with_edit(text, at, context, begin, num_equal)
        longest = max(longest, length)
        if length >= LONG_ENOUGH:
            most = first + _FEW_MATCHES
        if num >= most or (_WEAK * length < longest and num >= first + _ENOUGH_STRONG):
            break
        num = _put_history(matches, num, history, at, context, begin, length, edit)
    return num


@lean
def _put_history(
    matches: Matches, num: int, history: Histories, at: int, context: Int32Array, begin: int, length: int, edit: int
) -> int:
    """Add the match that ends at text[at], unless the rollout ends there."""
    if history.text[at + 1] == MARKER:
        return num
    shift = shift_bucket(history.positions[at] - (context.size - begin))
    return int(put(matches, num, HISTORY, IN_HISTORY, at + 1, length, edit, shift))


@lean
def find_in_others(
    matches: Matches, num: int, others: Others, own: Int64Array, context: Int32Array, begin: int, right: int
) -> int:
    """Add the longest matches of the row's context in other prompts' rollouts, longest first.

    The row's own prompt spans `own[0]` to `own[1]`. `right` positions sort before the context.
    """
    text, order = others.text, others.order
    own_begin, own_end = own[0], own[1]
    sides = sides_of(right)
    most, last = num + _MAX_OTHERS, context.size - 1
    for _ in range(2 * _MAX_OTHERS):
        at, length, sides = next_match(sides, text, order, 0, context, begin)
        if num == most or length == 0:
            break
        if own_begin <= at < own_end or text[at + 1] == MARKER:
            continue
        edit = 0
        if length < LONG_ENOUGH:
            edit = agree_after_edit(text, at - length, context, last - length, begin)
        num = put(matches, num, OTHERS, IN_OTHERS, at + 1, length, edit, FAR)
    return num
