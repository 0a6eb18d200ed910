"""Published rollouts as flat sorted texts that one compiled call searches: of the running prompts, and of others.

A running prompt's index is copied once, when the prompt first appears; no step copies an amount that grows with the
history. The text of other prompts depends on the snapshot alone, so that a resumed run drafts like the run that it
resumes.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from treering.arrays import Int32Array, Int64Array
from treering.compiling.lean import lean
from treering.history.features import FAR, HISTORY, OTHERS, shift_bucket
from treering.history.match.matches import IN_HISTORY, IN_OTHERS, LONG_ENOUGH, Matches, agree_after_edit, put, with_edit
from treering.history.match.suffix_search import KEY_BITS, BatchedSearch, add_query, keys_of, next_match, sides_of
from treering.history.store.prompt_index import MARKER, PromptIndex, check_entries, sort_contexts
from treering.history.store.snapshot import newest_first
from treering.types import PromptId

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
    """Texts and sorted positions of prompts, one after another.

    Attributes:
        text: int32, the texts; a marker follows the last one.
        order: int32, aligned with the texts; positions count from the start of the prompt's own text.
        keys: int64, see `keys_of`; a slot's keys begin at start // 16 + slot.
        positions: int32, aligned with the texts: entries since the marker of the rollout.
        spans: int64 [slots, 2], start and size of each slot; size 0 is a prompt without history.

    Example: prompts with texts of 3 and 5 entries have the spans [0, 3] and [3, 5].
    """

    def __init__(self) -> None:
        """An empty arena."""
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
        """The arrays, for compiled calls."""
        return Histories(self.spans, self.text, self.order, self.keys, self.positions)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    def slots(self, prompt_ids: Sequence[PromptId], snapshot: Mapping[PromptId, PromptIndex]) -> Int64Array:
        """The slot of each prompt, int64 [B]; missing prompts are added from the snapshot."""
        if snapshot is not self._snapshot:
            self._clear(snapshot)
        found = list(map(self._slots.get, prompt_ids))
        if None in found:
            self._add(dict.fromkeys(prompt_ids))
            found = [self._slots[prompt_id] for prompt_id in prompt_ids]
        return np.array(found, np.int64)

    def forget(self) -> None:
        """Removes all prompts; the arena then grows as a new one would."""
        self._clear(_NOTHING)

    def _clear(self, snapshot: Mapping[PromptId, PromptIndex]) -> None:
        self._snapshot = snapshot
        self._slots = {}
        self._num_used = 0

    def _add(self, prompt_ids: Mapping[PromptId, None]) -> None:
        indexes = {prompt_id: self._snapshot.get(prompt_id) for prompt_id in prompt_ids}
        sizes = {prompt_id: 0 if index is None else index.text.size for prompt_id, index in indexes.items()}
        # Too many prompts no longer run: copying the running ones again costs less than keeping the others.
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
        """Allocates so many entries and slots; grows by at least a quarter."""
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
    """The position of each entry of a text in its rollout, int32: entries since the rollout's marker.

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
    """The rollouts published last, one prompt after another, each prompt's newest version first.

    Prompts with the newest versions come first; ties go to the prompt that was added last.

    Attributes:
        text: int32 [N + 1], the texts and a marker.
        order: int32 [N], positions sorted by their contexts; see `PromptIndex`.
        keys: int64 [ceil(N / 16)], see `keys_of`.

    Example: prompts "a" with [5, 6] and "b" with [7] give the text -1, 7, -1, 5, 6, -1, where "b" has the span
    from 0 to 2 and "a" that from 2 to 5.
    """

    def __init__(self, max_tokens: int) -> None:
        """Keeps at most `max_tokens` entries."""
        self._max_tokens = max_tokens
        self._spans: dict[PromptId, tuple[int, int]] = {}
        self._snapshot: Mapping[PromptId, PromptIndex] | None = None
        self._fill([])

    @property
    def arrays(self) -> Others:
        """The arrays, for compiled calls."""
        return Others(self.text, self.order, self.keys)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    def spans(self, prompt_ids: Sequence[PromptId]) -> Int64Array:
        """Where each prompt's rollouts begin and end, int64 [B, 2]; 0, 0 for a prompt that is not included."""
        found = [self._spans.get(prompt_id, (0, 0)) for prompt_id in prompt_ids]
        return np.array(found, np.int64).reshape(len(found), 2)

    def take(self, snapshot: Mapping[PromptId, PromptIndex]) -> None:
        """Reads a snapshot, unless it is the latest one read or nothing is kept."""
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
"""Matches shorter than a third of the longest are left out once there are four."""


@lean
def add_history_query(
    queries: BatchedSearch, q: int, tokens: Int32Array, row: int, end: int, begin: int, history: Histories, slot: int
) -> None:
    """`add_query` in a prompt's history."""
    start, size = history.spans[slot]
    add_query(queries, q, tokens, row, end, begin, start, size, (start >> KEY_BITS) + slot)


@lean
def find_in_history(
    matches: Matches, num: int, history: Histories, slot: int, context: Int32Array, begin: int, right: int
) -> int:
    """Adds the longest matches of the row's context in its prompt's index, longest first.

    Args:
        matches: written from `num` on.
        num: matches so far.
        history: of the running prompts.
        slot: of the row's prompt.
        context: int32 [n], the row's tokens.
        begin: where the rollout begins.
        right: positions of the index that sort before the context.

    Returns:
        The number of matches.
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
    """Adds the match that ends at text[at], unless the rollout ends there."""
    if history.text[at + 1] == MARKER:
        return num
    shift = shift_bucket(history.positions[at] - (context.size - begin))
    return int(put(matches, num, HISTORY, IN_HISTORY, at + 1, length, edit, shift))


@lean
def find_in_others(
    matches: Matches, num: int, others: Others, own: Int64Array, context: Int32Array, begin: int, right: int
) -> int:
    """Adds the longest matches of the row's context in other prompts' rollouts, longest first.

    The row's own prompt spans `own[0]` to `own[1]`; `right` positions sort before the context.
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
