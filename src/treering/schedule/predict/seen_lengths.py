"""All lengths seen so far, stored as counts, and their exact median."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


class SeenLengths:
    """A multiset of lengths; memory grows with the longest length, not with their number.

    >>> seen = SeenLengths()
    >>> seen.median(default=7.0)
    7.0
    >>> seen.add(np.array([10, 20, 20, 90]))
    >>> seen.add(np.array([5, 4]))
    >>> seen.median(default=7.0)
    15.0
    """

    def __init__(self) -> None:
        self._counts = np.zeros(0, np.int64)
        self._median: float | None = None

    def add(self, lengths: NDArray[np.int64]) -> None:
        """Adds lengths, int64 >= 0."""
        counts = np.bincount(lengths, minlength=self._counts.size)
        counts[: self._counts.size] += self._counts
        self._counts = counts
        self._median = None

    def median(self, *, default: float) -> float:
        """The median, with the mean of the middle two for an even number; `default` if there are no lengths."""
        if self._median is None:
            self._median = self._find_median()
        return default if self._median is None else self._median

    def state(self) -> dict[str, Any]:
        """Checkpoint state: the lengths and their counts, as lists."""
        (lengths,) = np.nonzero(self._counts)
        return {"lengths": lengths.tolist(), "counts": self._counts[lengths].tolist()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a `state`."""
        self._counts = np.zeros(max(state["lengths"], default=-1) + 1, np.int64)
        self._counts[state["lengths"]] = state["counts"]
        self._median = None

    def _find_median(self) -> float | None:
        up_to = np.cumsum(self._counts)
        if not up_to.size:
            return None
        number = int(up_to[-1])
        middle = np.searchsorted(up_to, [(number - 1) // 2, number // 2], side="right")
        return float(middle.mean())
