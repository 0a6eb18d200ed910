"""The indexes of the running prompts, copied into shared flat arrays so that one compiled call searches all of them.

A prompt's index is copied once, when the prompt first appears; no step copies an amount that grows with the history.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from treering.arrays import Int32Array, Int64Array
from treering.history.match.suffix_search import KEY_BITS, write_keys
from treering.history.store.prompt_index import MARKER, PromptIndex, check_entries
from treering.lean import kernel
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
        keys: int64, see `write_keys`; a slot's keys begin at start // 16 + slot.
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
        write_keys(index.text, index.order, self.keys[_keys_at(start, size, slot)])
        write_positions(index.text, self.positions[part])
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


@kernel
def write_positions(text: Int32Array, positions: Int32Array) -> None:
    """Writes the position of each entry of a text in its rollout: entries since the rollout's marker.

    Example: the text -1, 7, 5, -1, 7 has the positions 0, 1, 2, 0, 1.
    """
    position = 0
    for at in range(text.size):
        if text[at] == MARKER:
            position = 0
        positions[at] = position
        position += 1
