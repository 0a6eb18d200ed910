"""The most recently published rollouts of all prompts as one sorted text, for prompts whose own history has no match.

Depends on the snapshot alone, so that a resumed run drafts like the run that it resumes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from treering.arrays import Int32Array, Int64Array
from treering.history.match.suffix_search import KEY_BITS, write_keys
from treering.history.store.prompt_index import MARKER, PromptIndex, sort_contexts
from treering.history.store.snapshot import newest_first
from treering.types import PromptId


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
        keys: int64 [ceil(N / 16)], see `write_keys`.

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
        """Reads a snapshot, unless it is the latest one read."""
        if snapshot is self._snapshot:
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
        self.keys = np.zeros(-(-self.order.size >> KEY_BITS), np.int64)
        write_keys(self.text, self.order, self.keys)
