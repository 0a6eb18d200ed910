"""The indexes of the prompts that are running, side by side in flat arrays, so that one compiled call reads them all.

Knows where each prompt's index stands, and what is said of its places. Knows nothing of rows and drafts. A prompt's
arrays are copied when it first appears; nothing proportional to the history is copied per step.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treering.arrays import Float32Array, Int32Array, Int64Array
from treering.history.features import NUM_AGES
from treering.history.match.suffix_search import KEY_BITS, write_keys
from treering.history.store.prompt_index import MARKER, PromptIndex, check_entries
from treering.types import PromptId

SAID_BITS = 4
"""Bits of a note that age and reward class take."""
NOTE_BITS = 6
_PADDING = 2
_MAX_DEPTH = (1 << (31 - NOTE_BITS)) - 1
"""Entries since a marker that a note has room for; those further on count as so many."""

Rewards = Literal["read", "unread"]

_NOTHING: Mapping[PromptId, PromptIndex] = MappingProxyType({})


class Histories(NamedTuple):
    """What a compiled call reads of an arena; see `Arena`."""

    spans: Int64Array
    text: Int32Array
    order: Int32Array
    keys: Int64Array
    about: Int32Array
    rewards: Float32Array


class Arena:
    """Texts and places of prompts, one after another.

    Attributes:
        text: int32, the texts; a marker stands behind the last one.
        order: int32, aligned with the texts; places count from the start of the prompt's own text.
        keys: int64, see `write_keys`; those of a slot begin at a sixteenth of its start, and the slot's number further.
        about: int32, aligned: entries since the marker of the rollout, times 64, and a note on the rollout: age in
            versions (0 is the newest) + NUM_AGES * reward class + 16 * how many are newer.
        rewards: float32, aligned: the rollout's reward, 0 where it is not known; empty where none are wanted.
        spans: int64 [slots, 2], start and size of each slot; size 0 is a prompt without history.
        generation: rises whenever slots have moved, so that places that were kept mean nothing any more.

    Example: prompts with texts of 3 and 5 entries have the spans [0, 3] and [3, 5].
    """

    def __init__(self, *, rewards: Rewards = "unread") -> None:
        """Rewards of places are kept where a policy reads them."""
        self._keeps_rewards = rewards == "read"
        self._snapshot = _NOTHING
        self._slots: dict[PromptId, int] = {}
        self._num_used = 0
        self.generation = 0
        self.text = np.full(_PADDING, MARKER, np.int32)
        self.order = np.zeros(0, np.int32)
        self.keys = np.zeros(1, np.int64)
        self.about = np.zeros(0, np.int32)
        self.rewards = np.zeros(0, np.float32)
        self.spans = np.zeros((0, 2), np.int64)

    @property
    def arrays(self) -> Histories:
        """What a compiled call reads."""
        return Histories(self.spans, self.text, self.order, self.keys, self.about, self.rewards)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    def slots(self, prompt_ids: Sequence[PromptId], snapshot: Mapping[PromptId, PromptIndex]) -> Int64Array:
        """The slot of each prompt, int64 [B]; prompts that are not there are taken in, from this snapshot."""
        if snapshot is not self._snapshot:
            self._clear(snapshot)
        found = list(map(self._slots.get, prompt_ids))
        if None in found:
            self._take_in(dict.fromkeys(prompt_ids))
            found = [self._slots[prompt_id] for prompt_id in prompt_ids]
        return np.array(found, np.int64)

    def forget(self) -> None:
        """Holds nothing any more, so that what it holds next, and when it makes room, is what a new one would."""
        self._clear(_NOTHING)

    def _clear(self, snapshot: Mapping[PromptId, PromptIndex]) -> None:
        self._snapshot = snapshot
        self._slots = {}
        self._num_used = 0
        self.generation += 1

    def _take_in(self, prompt_ids: Mapping[PromptId, None]) -> None:
        indexes = {prompt_id: self._snapshot.get(prompt_id) for prompt_id in prompt_ids}
        sizes = {prompt_id: 0 if index is None else index.text.size for prompt_id, index in indexes.items()}
        # Too much of prompts that are no longer running: what runs is copied again, which is less than what goes.
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
        place = slice(start, start + size)
        self.text[place], self.order[place] = index.text, index.order
        write_keys(index.text, index.order, self.keys[_keys_at(start, size, slot)])
        rewards = self.rewards[place] if self._keeps_rewards else self.rewards
        describe(index.text, index.starts, index.rewards, _reward_classes(index.rewards), self.about[place], rewards)
        self._num_used += size
        self.text[self._num_used : self._num_used + _PADDING] = MARKER

    def _reserve(self, num_entries: int, num_slots: int) -> None:
        """Room for that many entries and slots; grows by a quarter at least."""
        check_entries(
            num_entries + _PADDING, "the history of the prompts that run", "run fewer prompts at a time, or keep fewer "
            "versions (max_epochs)",
        )  # fmt: skip
        room = self.order.size
        if num_entries > room:
            more = max(num_entries, room + room // 4) - room
            self.text = np.append(self.text, np.full(more, MARKER, np.int32))
            for name in ("order", "about", "rewards") if self._keeps_rewards else ("order", "about"):
                array = getattr(self, name)
                setattr(self, name, np.append(array, np.zeros(more, array.dtype)))
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


@njit(inline="always")
def order_of(history: Histories, slot: int) -> Int32Array:
    """A slot's part of the order."""
    start, size = history.spans[slot]
    part: Int32Array = history.order[start : start + size]
    return part


def _reward_classes(rewards: Float32Array) -> NDArray[np.uint8]:
    known = np.isfinite(rewards)
    if not known.any():
        return np.zeros(rewards.size, np.uint8)
    return np.where(known, np.where(rewards >= rewards[known].mean(), 2, 1), 0).astype(np.uint8)


@njit(cache=True, nogil=True)
def describe(
    text: Int32Array,
    starts: Int64Array,
    rewards: Float32Array,
    classes: NDArray[np.uint8],
    about: Int32Array,
    by_place: Float32Array,
) -> None:
    """Fills what is said of every place of an index, and its reward where there is room for it."""
    ends = np.empty(starts.size - 1, np.int64)  # by version: rollouts up to its last one
    rollout, age = 0, 0
    for place in range(text.size):
        while place >= starts[age + 1]:
            ends[age] = rollout
            age += 1
        rollout += text[place] == MARKER
    ends[age] = rollout
    rollout, depth, age = -1, 0, 0
    for place in range(text.size):
        if place >= starts[age + 1]:
            age += 1
        if text[place] == MARKER:
            rollout += 1
            depth = 0
        num_newer = (ends[age - 1] if age > 0 else 0) + ends[age] - 1 - rollout
        recent = min(num_newer, 1) + (num_newer > 1) + (num_newer > 3)
        note = min(age, NUM_AGES - 1) + NUM_AGES * classes[rollout] + (recent << SAID_BITS)
        about[place] = (min(depth, _MAX_DEPTH) << NOTE_BITS) + note
        if by_place.size > 0:
            by_place[place] = 0.0 if np.isnan(rewards[rollout]) else rewards[rollout]
        depth += 1
