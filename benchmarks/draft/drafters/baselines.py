"""Simple and published drafters, one row at a time: n-grams of the own context, longest match, RhymeRL's two versions.

They follow the rules as published and released, but search by scanning: compare their drafts, not their times.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from benchmarks.draft.drafters.search import MARKER, favourite_path, occurrences
from treering.analysis.recording import Recorded
from treering.arrays import Int32Array, Int64Array

Priority = Literal["frequency", "reward"]
"""The branch that is drafted after a match: the most frequent one, or that with the greatest sum of rewards."""

_MARKER = np.array([MARKER], np.int32)


class Ngram:
    """vLLM's `ngram`: the longest end of 2 to 5 tokens that occurs earlier in the context, and 16 tokens from there.

    It takes the first of several matches.

    Example: context 1 2 3 1 2 drafts 3 1 2.
    """

    num_bytes = 0
    """Keeps none."""

    def start(self, recorded: Recorded, sources: Int64Array) -> None:
        """Has no history."""

    def propose(self, context: Int32Array) -> Int32Array:
        """The tokens after the earliest match."""
        _, positions = occurrences(context, context, 2, 5)
        return context[positions[0] : positions[0] + 16] if positions.size else context[:0]

    def observe(self, num_drafted: int, num_accepted: int, is_rejected: bool) -> None:
        """Learns nothing."""


class _Searching:
    """A drafter that scans the responses of the history."""

    def __init__(self, priority: Priority) -> None:
        self._priority = priority
        self._history, self._weights = _MARKER, np.zeros(1)

    @property
    def num_bytes(self) -> int:
        """Length of the text that is searched."""
        return int(self._history.nbytes)

    def start(self, recorded: Recorded, sources: Int64Array) -> None:
        """Takes the responses of the sources, each token weighted by the priority."""
        parts = [recorded.response(source) for source in sources.tolist()]
        self._history = joined(parts)
        values = recorded.rewards[sources] if self._priority == "reward" else np.zeros(sources.size)
        self._weights = np.concatenate([[0.0], np.repeat(values, [part.size + 1 for part in parts])])

    def observe(self, num_drafted: int, num_accepted: int, is_rejected: bool) -> None:
        """Learns nothing."""


class Naive(_Searching):
    """The longest end of up to 16 tokens that occurs in history or the context, and 8 tokens of the favourite path.

    Example: history 5 6 7 and 5 6 8 9 and 5 6 8 9, context 5 6: by frequency it drafts 8 9.
    """

    def propose(self, context: Int32Array) -> Int32Array:
        """The favourite path after the longest match; the context has no reward yet."""
        text = np.concatenate([self._history, context, _MARKER])
        _, positions = occurrences(text, context, 1, 16)
        weights = np.concatenate([self._weights, np.zeros(context.size + 1)])
        return favourite_path(text, positions, weights, 8, 0.0)


class Rhyme(_Searching):
    """RhymeRL's HistoSpec: ends of 7 tokens or fewer in the prompt's history, and a window that follows acceptance.

    `paper`: ends of 3 or more, the branch with the largest sum of rewards (or the most frequent one), the window grows
    by 2 up to 32 and falls back to 2. `released`: ends of 4 or more, the prompt and, after its last 5 tokens, each
    response, the most frequent branch down to a tenth of the matches, the window doubles up to 16 and halves; a draft
    that is shorter than the window halves it although all of it was right. A step without a draft leaves the window as
    it is.
    """

    def __init__(self, version: Literal["paper", "released"], priority: Priority) -> None:
        super().__init__(priority)
        self._is_released = version == "released"
        self._cap = 16 if self._is_released else 32
        self._window = self._first_window = 2

    def start(self, recorded: Recorded, sources: Int64Array) -> None:
        """Takes the responses of the sources, and resets the window."""
        super().start(recorded, sources)
        if self._is_released:
            self._history = joined(_prompts_and_tails(recorded, sources))
            self._weights = np.zeros(self._history.size)
        self._window = self._first_window

    def propose(self, context: Int32Array) -> Int32Array:
        """The favourite branch after the longest match, of at most the window's length."""
        shortest, min_share = (4, 0.1) if self._is_released else (3, 0.0)
        _, positions = occurrences(self._history, context, shortest, 7)
        return favourite_path(self._history, positions, self._weights, self._window, min_share)

    def observe(self, num_drafted: int, num_accepted: int, is_rejected: bool) -> None:
        """Moves the window."""
        if num_drafted == 0:
            return
        if self._is_released:
            is_full = num_accepted == num_drafted == self._window
            self._window = min(2 * self._window, self._cap) if is_full else max(self._window // 2, self._first_window)
        else:
            self._window = self._first_window if is_rejected else min(self._window + 2, self._cap)


def _prompts_and_tails(recorded: Recorded, sources: Int64Array) -> list[Int32Array]:
    """The prompt of each task once, and every response after its prompt's last 5 tokens."""
    _, firsts = np.unique(recorded.prompts[sources], return_index=True)
    offsets, starts = recorded.offsets, recorded.starts
    prompts = [recorded.tokens[offsets[one] : starts[one]] for one in sources[np.sort(firsts)].tolist()]
    begins = np.maximum(starts[sources] - 5, offsets[sources])
    ends = offsets[sources + 1]
    return prompts + [recorded.tokens[begin:end] for begin, end in zip(begins, ends, strict=True)]


def joined(parts: Sequence[Int32Array]) -> Int32Array:
    """Texts with a marker before, between and after them.

    Example: [5, 6] and [7] give [-1, 5, 6, -1, 7, -1].
    """
    return np.concatenate([_MARKER, *(piece for part in parts for piece in (part, _MARKER))], dtype=np.int32)
