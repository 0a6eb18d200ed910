"""The indexes of the prompts that are running, side by side in two arrays, so that one compiled call reads them all.

Knows where each prompt's index stands. Knows nothing of rows and drafts. A prompt's arrays are copied when it first
appears; nothing proportional to the history is copied per step.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from treering.history.index import MARKER, MAX_DEPTH, PromptIndex
from treering.types import PromptId

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

_NOTHING: Mapping[PromptId, PromptIndex] = MappingProxyType({})


class Arena:
    """Texts and suffixes of prompts, one after another.

    Attributes:
        text: int32, the texts; markers stand behind the last one, as far as a search can read.
        suffixes: int32, aligned with the texts; places count from the start of the prompt's own text.
        spans: int64 [slots, 2], start and size of each slot; size 0 is a prompt without history.

    Example: prompts with texts of 3 and 5 entries have the spans [0, 3] and [3, 5].
    """

    def __init__(self) -> None:
        self._snapshot = _NOTHING
        self._slots: dict[PromptId, int] = {}
        self._num_used = 0
        self.text = np.full(MAX_DEPTH, MARKER, np.int32)
        self.suffixes = np.zeros(0, np.int32)
        self.spans = np.zeros((0, 2), np.int64)

    def slots(self, prompt_ids: Sequence[PromptId], snapshot: Mapping[PromptId, PromptIndex]) -> Int64Array:
        """The slot of each prompt, int64 [B]; prompts that are not there are taken in, from this snapshot."""
        if snapshot is not self._snapshot:
            self._clear(snapshot)
        found = list(map(self._slots.get, prompt_ids))
        if None in found:
            self._take_in(dict.fromkeys(prompt_ids))
            found = [self._slots[prompt_id] for prompt_id in prompt_ids]
        return np.array(found, np.int64)

    def _clear(self, snapshot: Mapping[PromptId, PromptIndex]) -> None:
        self._snapshot = snapshot
        self._slots = {}
        self._num_used = 0

    def _take_in(self, prompt_ids: Mapping[PromptId, None]) -> None:
        sizes = {prompt_id: self._size(prompt_id) for prompt_id in prompt_ids}
        # Too much of prompts that are no longer running: what runs is copied again, which is less than what goes.
        if self._num_used > 2 * sum(sizes.values()) or len(self._slots) > 2 * len(sizes):
            self._clear(self._snapshot)
        new = [prompt_id for prompt_id in prompt_ids if prompt_id not in self._slots]
        self._reserve(self._num_used + sum(sizes[prompt_id] for prompt_id in new), len(self._slots) + len(new))
        for prompt_id in new:
            self._append(prompt_id, sizes[prompt_id])

    def _append(self, prompt_id: PromptId, size: int) -> None:
        slot, start = len(self._slots), self._num_used
        self._slots[prompt_id] = slot
        self.spans[slot] = start, size
        if size == 0:
            return
        index = self._snapshot[prompt_id]
        self.text[start : start + size] = index.text
        self.suffixes[start : start + size] = index.suffixes
        self._num_used += size
        self.text[self._num_used : self._num_used + MAX_DEPTH] = MARKER

    def _size(self, prompt_id: PromptId) -> int:
        index = self._snapshot.get(prompt_id)
        return 0 if index is None else index.text.size

    def _reserve(self, num_entries: int, num_slots: int) -> None:
        """Room for that many entries and slots; grows by doubling."""
        if num_entries > self.suffixes.size:
            room = max(num_entries, 2 * self.suffixes.size)
            self.text = np.append(self.text, np.full(room - self.suffixes.size, MARKER, np.int32))
            self.suffixes = np.append(self.suffixes, np.zeros(room - self.suffixes.size, np.int32))
        if num_slots > self.spans.shape[0]:
            grown = np.zeros((max(num_slots, 2 * self.spans.shape[0]), 2), np.int64)
            grown[: self.spans.shape[0]] = self.spans
            self.spans = grown
