"""The distribution of prediction errors, by predicted length. Predictions and errors are logarithms.

N errors that were seen, B bins, R errors to draw
"""

from itertools import pairwise

import numpy as np

from treering.arrays import Float64Array, Int64Array

_NUM_BINS = 32
_LEAST_IN_BIN = 64

_SIGMA_OF_MEDIAN = 1.4826
"""Standard deviations in the median distance from the median, for the normal distribution."""

_UNUSUAL = 3.0
"""An error this many spreads from the middle does not belong to the normal distribution."""


class PredictionErrors:
    """Errors by bins of similar predictions: a normal distribution in each, plus the observed outliers.

    Errors differ between long and short predictions and are asymmetric: many of the longest rollouts end at the limit,
    and early ends lie far below. Resampling only observed errors would overfit plans to the few longest rollouts.

    Example: of errors [0.1, -0.1] * 40 + [-2.0] * 20 a fifth of the samples is -2.0, the rest is normal around -0.1
    with a spread of 0.3.
    """

    def __init__(self, predicted: Float64Array, errors: Float64Array) -> None:
        """`predicted` and `errors`: float64 [N], N >= 1, by rollout; errors at the length limit are infinite."""
        order = np.argsort(predicted, kind="stable")
        self._predicted, self._errors = predicted[order], errors[order]
        num_bins = min(max(predicted.size // _LEAST_IN_BIN, 1), _NUM_BINS)
        self._firsts = np.arange(num_bins + 1) * predicted.size // num_bins
        bins = [self._errors[first:end] for first, end in pairwise(self._firsts)]
        self._middles, self._spreads = np.array([_middle_and_spread(each) for each in bins]).T

    def draw(self, predicted: Float64Array, random: np.random.Generator) -> Float64Array:
        """float64 [R]: an error for each prediction, float64 [R]; infinite for one that reaches the limit."""
        bins = self._bins_of(predicted, random)
        middles, spreads = self._middles[bins], self._spreads[bins]
        seen = self._errors[random.integers(self._firsts[bins], self._firsts[bins + 1])]
        usual = middles + spreads * random.standard_normal(predicted.size)
        return np.where(np.abs(seen - middles) <= _UNUSUAL * spreads, usual, seen)

    def _bins_of(self, predicted: Float64Array, random: np.random.Generator) -> Int64Array:
        """int64 [R]: if equal predictions fill several bins, a random one of these."""
        first = np.searchsorted(self._predicted, predicted, side="left")
        end = np.searchsorted(self._predicted, predicted, side="right")
        places = random.integers(first, np.maximum(end, first + 1))
        found: Int64Array = np.searchsorted(self._firsts[1:-1], places, side="right")
        return found


def _middle_and_spread(errors: Float64Array) -> tuple[float, float]:
    """Median of the finite errors, and the standard deviation estimated from their distances to it."""
    below = errors[np.isfinite(errors)]
    if below.size == 0:
        return 0.0, 0.0
    middle = float(np.median(below))
    return middle, _SIGMA_OF_MEDIAN * float(np.median(np.abs(below - middle)))
