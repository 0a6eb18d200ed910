"""Seconds by size, learnt from real passes: recent averages, without outliers, and a curve between them."""

import math

import numpy as np

from treering.arrays import Float64Array
from treering.history.budget.costs import VerifyCosts
from treering.history.budget.selection import seconds_of

_PER_OCTAVE = 4
"""Sizes this close, in shares of a factor of two, count as one."""
_KEPT = 0.85
"""Share of an average that a new time leaves: about the last seven times count."""
_MOST_LONGER = 2.0
"""A time counts as at most this much longer than its average: other load disturbs single passes."""
_SLOPE_WITHOUT_DATA = 0.7
"""Price of one more token beyond the only known size, as a share of that size's seconds per token."""
_FIRST_REFRESH, _MORE = 16, 2
"""Passes after which costs are new again, and the growth of that number."""


class PassTimes:
    """Average seconds of passes by their size: the costs of an engine that cannot be measured.

    Example: passes of 8 tokens in 2.0 ms and of 16 in 2.8 ms give 2.4 ms for 12 and, beyond them, 4.4 ms for 32. After
    each pass, `costs = times.new_costs()`, and unless they are None `drafter.use_costs(costs)`.
    """

    def __init__(self) -> None:
        """Starts without times."""
        self._sizes: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._curve: VerifyCosts | None = None
        self._num_noted = self._next_refresh = 0

    def note(self, size: int, seconds: float) -> None:
        """Takes the time of one pass of so many tokens, without prefill."""
        key = round(_PER_OCTAVE * math.log2(size))
        if key not in self._seconds:
            self._sizes[key], self._seconds[key] = float(size), seconds
        else:
            average = self._seconds[key]
            self._seconds[key] = _KEPT * average + (1 - _KEPT) * min(seconds, _MOST_LONGER * average)
            self._sizes[key] = _KEPT * self._sizes[key] + (1 - _KEPT) * size
        self._curve = None
        self._num_noted += 1

    def knows(self, size: int) -> bool:
        """Whether a pass within a factor of two of this size was timed."""
        key = _PER_OCTAVE * math.log2(size)
        return any(abs(known - key) <= _PER_OCTAVE for known in self._seconds)

    def seconds_of(self, size: int) -> float:
        """Expected seconds; needs at least one time."""
        curve = self.curve()
        seconds: float = seconds_of(size, curve.num_tokens, curve.seconds)
        return seconds

    def curve(self) -> VerifyCosts:
        """The averages as costs, with one entry beyond the largest size; needs at least one time."""
        if self._curve is None:
            keys = sorted(self._seconds)
            sizes = np.unique(np.maximum(1, np.round([self._sizes[key] for key in keys])).astype(np.int64))
            known = [self._sizes[key] for key in keys], [self._seconds[key] for key in keys]
            seconds = non_decreasing(np.interp(sizes, *known))
            last, most = int(sizes[-1]), float(seconds[-1])
            slope = _SLOPE_WITHOUT_DATA * most / last
            if sizes.size > 1:
                first = max(0, int(np.searchsorted(sizes, last / 2, side="right")) - 1)
                slope = (most - float(seconds[first])) / (last - int(sizes[first]))
            self._curve = VerifyCosts(
                num_tokens=np.append(sizes, 2 * last), seconds=np.append(seconds, most + slope * last)
            )
        return self._curve

    def new_costs(self) -> VerifyCosts | None:
        """The averages as costs, if there were none before or enough passes were noted since; else None.

        Costs are new after 1 pass, 17, 34, 68 and so on: a drafter forgets with them whether drafts pay.
        """
        if self._num_noted < max(1, self._next_refresh):
            return None
        self._next_refresh = max(self._num_noted + _FIRST_REFRESH, _MORE * self._num_noted)
        return self.curve()


def non_decreasing(seconds: Float64Array) -> Float64Array:
    """Makes times non-decreasing: the midpoint of the maximum up to each entry and the minimum from it on.

    Example: [1.0, 1.2, 1.0, 1.4] become [1.0, 1.1, 1.1, 1.4].
    """
    greatest = np.maximum.accumulate(seconds)
    least = np.minimum.accumulate(seconds[::-1])[::-1]
    return (greatest + least) / 2
