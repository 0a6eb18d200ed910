"""Published drafters on one row at a time: own-context n-grams, naive longest match, and RhymeRL's two versions.

Knows their rules as published and released. They search by scanning: their drafts are theirs, their times are not.
"""

from typing import Literal

import numpy as np

from benchmarks.draft.drafters.search import MARKER, favourite_path, occurrences
from benchmarks.draft.recording import Recording
from treering.arrays import Int32Array, Int64Array

_MARKER = np.array([MARKER], np.int32)


class Ngram:
    """vLLM's `ngram`: the longest end of 2 to 5 tokens that occurs earlier in the context, and 16 tokens from there.

    Of several places it takes the first.

    Example: context 1 2 3 1 2 drafts 3 1 2.
    """

    num_bytes = 0
    """Keeps none."""

    def __init__(self, max_draft: int | None) -> None:
        self._max_draft = 16 if max_draft is None else max_draft

    def start(self, recording: Recording, sources: Int64Array) -> None:
        """Has no history."""

    def propose(self, context: Int32Array) -> Int32Array:
        """What followed at the earliest place."""
        _, places = occurrences(context, context, 2, 5)
        return context[places[0] : places[0] + self._max_draft] if places.size else context[:0]

    def observe(self, num_drafted: int, num_accepted: int, is_rejected: bool) -> None:
        """Learns nothing."""


class Naive:
    """The longest end of up to 16 tokens that occurs in history or the context, and 8 tokens of the most frequent path.

    Example: history 5 6 7 and 5 6 8 9 and 5 6 8 9, context 5 6: it drafts 8 9.
    """

    def __init__(self, max_draft: int | None) -> None:
        self._max_draft = 8 if max_draft is None else max_draft
        self._history = _MARKER

    @property
    def num_bytes(self) -> int:
        """Of the text that is searched."""
        return int(self._history.nbytes)

    def start(self, recording: Recording, sources: Int64Array) -> None:
        """Takes the responses of the sources as they are."""
        self._history = joined([recording.response(source) for source in sources.tolist()])

    def propose(self, context: Int32Array) -> Int32Array:
        """The most frequent path behind the longest match."""
        text = np.concatenate([self._history, context, _MARKER])
        _, places = occurrences(text, context, 1, 16)
        return favourite_path(text, places, np.zeros(text.size), self._max_draft, 0.0)

    def observe(self, num_drafted: int, num_accepted: int, is_rejected: bool) -> None:
        """Learns nothing."""


class Rhyme:
    """RhymeRL's HistoSpec: ends of 7 tokens or fewer in the prompt's history, and a window that follows acceptance.

    `paper`: ends of 3 or more, the branch with the largest sum of rewards (or the most frequent one), the window grows
    by 2 up to 32 and falls back to 2. `released`: ends of 4 or more, the prompt and, behind its last 5 tokens, each
    response, the most frequent branch down to a tenth of the places, the window doubles up to 16 and halves; a draft
    that is shorter than the window halves it although all of it was right. A step without a draft leaves the window as
    it is.
    """

    def __init__(
        self, version: Literal["paper", "released"], priority: Literal["reward", "frequency"], max_draft: int | None
    ) -> None:
        self._is_released = version == "released"
        self._priority = priority
        self._cap = min(16 if self._is_released else 32, max_draft or 32)
        self._window = self._first_window = min(2, self._cap)
        self._history = _MARKER
        self._weights = np.zeros(1)

    @property
    def num_bytes(self) -> int:
        """Of the text that is searched."""
        return int(self._history.nbytes)

    def start(self, recording: Recording, sources: Int64Array) -> None:
        """Takes the responses of the sources, each weighted by its reward where that is the priority."""
        parts = [recording.response(source) for source in sources.tolist()]
        rewards = recording.rewards[sources] if self._priority == "reward" else np.zeros(sources.size)
        self._weights = np.concatenate([[0.0], np.repeat(rewards, [part.size + 1 for part in parts])])
        self._history = joined(parts)
        if self._is_released:
            self._history = joined(_prompts_and_tails(recording, sources))
            self._weights = np.zeros(self._history.size)
        self._window = self._first_window

    def propose(self, context: Int32Array) -> Int32Array:
        """The favourite branch behind the longest match, of at most the window's length."""
        shortest, min_share = (4, 0.1) if self._is_released else (3, 0.0)
        _, places = occurrences(self._history, context, shortest, 7)
        return favourite_path(self._history, places, self._weights, self._window, min_share)

    def observe(self, num_drafted: int, num_accepted: int, is_rejected: bool) -> None:
        """Moves the window."""
        if num_drafted == 0:
            return
        if self._is_released:
            is_full = num_accepted == num_drafted == self._window
            self._window = min(2 * self._window, self._cap) if is_full else max(self._window // 2, self._first_window)
        else:
            self._window = self._first_window if is_rejected else min(self._window + 2, self._cap)


def _prompts_and_tails(recording: Recording, sources: Int64Array) -> list[Int32Array]:
    """The prompt of each task once, and every response behind its prompt's last 5 tokens."""
    _, firsts = np.unique(recording.tasks[sources], return_index=True)
    offsets, starts = recording.offsets, recording.starts
    prompts = [recording.tokens[offsets[one] : starts[one]] for one in sources[np.sort(firsts)].tolist()]
    begins = np.maximum(starts[sources] - 5, offsets[sources])
    ends = offsets[sources + 1]
    return prompts + [recording.tokens[begin:end] for begin, end in zip(begins, ends, strict=True)]


def joined(parts: list[Int32Array]) -> Int32Array:
    """Texts with a marker before, between and behind them.

    Example: [5, 6] and [7] give [-1, 5, 6, -1, 7, -1].
    """
    return np.concatenate([_MARKER, *(piece for part in parts for piece in (part, _MARKER))], dtype=np.int32)
