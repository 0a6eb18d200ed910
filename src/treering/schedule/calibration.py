"""Correct predicted lengths by finished steps."""

from collections import deque
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treering.arrays import Float64Array, Int64Array
from treering.schedule.policy import NUM_LEARNT

_NUM_BINS = 32
_LEAST_IN_BIN = 64

_SIGMA_OF_MEDIAN = 1.4826
"""Standard deviation of a normal distribution over the median distance from its median."""

_UNUSUAL = 3.0
"""Errors at least this many spreads from the middle do not belong to the normal distribution."""


class PredictionErrors:
    """Errors by bins of similar predictions: a normal distribution in each, and the observed outliers.

    Errors differ between long and short predictions and are asymmetric: many of the longest rollouts end at the limit,
    and early ends are far below. Resampling only observed errors would overfit placements to the few longest rollouts.

    Example: of errors [0.1, -0.1] * 40 + [-2.0] * 20 a fifth of the samples is -2.0, the rest is normal around -0.1
    with a spread of 0.3.
    """

    def __init__(self, predicted: Float64Array, errors: Float64Array) -> None:
        """`predicted` and `errors` are float64 [N], N >= 1, by rollout; errors at the length limit are infinite."""
        order = np.argsort(predicted, kind="stable")
        self._predicted, self._errors = predicted[order], errors[order]
        num_bins = min(max(predicted.size // _LEAST_IN_BIN, 1), _NUM_BINS)
        self._firsts = np.arange(num_bins + 1) * predicted.size // num_bins
        bins = [self._errors[first:end] for first, end in pairwise(self._firsts)]
        self._middles, self._spreads = np.array([_middle_and_spread(each) for each in bins]).T

    def draw(self, predicted: Float64Array, random: np.random.Generator) -> Float64Array:
        """Sample an error for each prediction, float64 [R]; infinite for one that reaches the limit."""
        bins = self._bins_of(predicted, random)
        middles, spreads = self._middles[bins], self._spreads[bins]
        observed = self._errors[random.integers(self._firsts[bins], self._firsts[bins + 1])]
        usual = middles + spreads * random.standard_normal(predicted.size)
        return np.where(np.abs(observed - middles) <= _UNUSUAL * spreads, usual, observed)

    def _bins_of(self, predicted: Float64Array, random: np.random.Generator) -> Int64Array:
        """Return the bin of each prediction, int64 [R]; a random one if equal predictions fill several."""
        first = np.searchsorted(self._predicted, predicted, side="left")
        end = np.searchsorted(self._predicted, predicted, side="right")
        positions = random.integers(first, np.maximum(end, first + 1))
        found: Int64Array = np.searchsorted(self._firsts[1:-1], positions, side="right")
        return found


def _middle_and_spread(errors: Float64Array) -> tuple[float, float]:
    """Return the median of the finite errors, and the standard deviation estimated from their distances to it."""
    below = errors[np.isfinite(errors)]
    if below.size == 0:
        return 0.0, 0.0
    middle = float(np.median(below))
    return middle, _SIGMA_OF_MEDIAN * float(np.median(np.abs(below - middle)))


Pairs = tuple[NDArray[np.float64], NDArray[np.float64]]

PRIOR_SIGMA = 0.25
"""Sigma of log(length / prediction) before the first step was learnt."""

PRIOR_SPREAD = 0.7
"""Sigma of log lengths within a step before the first step was learnt. Spread that predictions do not explain adds to
their error."""

_PRIOR_ROLLOUTS = 16
"""Weight of the prior in rollouts; the prior trusts predictions unchanged."""

_MAX_ROLLOUTS = 4096
"""Most rollouts kept of one step, evenly spaced."""


class CalibratedLengths:
    """A line fitted to log lengths against log predictions, and the errors around it.

    It corrects predictions that are too long by a factor, reverses reversed ones, and maps useless ones to one length.

    Example: after a step with predictions [100, 200, 400] and lengths [50, 100, 200], many times each, a prediction of
    300 is corrected to 150.
    """

    def __init__(self, sigma: float = PRIOR_SIGMA) -> None:
        """`sigma` is that of log(length / prediction) before the first step was learnt."""
        self._prior = sigma
        self._learnt: deque[Pairs] = deque(maxlen=NUM_LEARNT)
        self._slope, self._offset, self._sigma = 1.0, 0.0, sigma
        self._errors: tuple[int, PredictionErrors] | None = None

    @property
    def has_learnt(self) -> bool:
        """Whether any step was learnt."""
        return bool(self._learnt)

    def learn(self, predicted: NDArray[np.float64], lengths: NDArray[np.int64]) -> None:
        """Learn from a step's predicted and actual lengths, float64 and int64 [R]."""
        chosen = np.unique(np.linspace(0, lengths.size - 1, _MAX_ROLLOUTS).astype(np.int64))
        self._learnt.append((np.log(predicted[chosen]), np.log(lengths[chosen])))
        self._fit(*self._all_learnt())
        self._errors = None

    def lengths(self, predicted: NDArray[np.float64], max_tokens: int) -> NDArray[np.float64]:
        """Return the likeliest lengths, float64 [R], at least 1 and at most `max_tokens`."""
        return np.clip(np.exp(self._line(np.log(predicted))), 1.0, max_tokens)

    def draw(self, predicted: NDArray[np.float64], max_tokens: int, random: np.random.Generator) -> NDArray[np.float64]:
        """Sample lengths, float64 [R], at least 1 and at most `max_tokens`.

        Errors around the line are sampled from those of similar predictions (see `PredictionErrors`). They are
        log-normal before the first step was learnt, and later in the share of the prior.

        Example: if a fifth of the rollouts predicted at 1,000 tokens ended at 300, so do about a fifth of samples.
        """
        guesses = np.log(predicted)
        errors = self.sigma(predicted) * random.standard_normal(guesses.size)
        if self.has_learnt:
            num_learnt = sum(pair[0].size for pair in self._learnt)
            is_prior = random.random(guesses.size) * (num_learnt + _PRIOR_ROLLOUTS) < _PRIOR_ROLLOUTS
            errors = np.where(is_prior, errors, self._errors_within(max_tokens).draw(guesses, random))
        return np.clip(np.exp(self._line(guesses) + errors), 1.0, max_tokens)

    def sigma(self, predicted: NDArray[np.float64]) -> float:
        """Return the sigma of the log lengths of these rollouts around their corrected predictions."""
        if self.has_learnt:
            return self._sigma
        unexplained = PRIOR_SPREAD**2 - float(np.log(predicted).var())
        return max(self._prior, float(np.sqrt(max(unexplained, 0.0))))

    def _errors_within(self, max_tokens: int) -> PredictionErrors:
        """Return the errors of all learnt rollouts; those of rollouts cut at `max_tokens` are infinite."""
        if self._errors is None or self._errors[0] != max_tokens:
            guesses, lengths = self._all_learnt()
            errors = np.where(lengths < np.log(max_tokens), lengths - self._line(guesses), np.inf)
            self._errors = max_tokens, PredictionErrors(guesses, errors)
        return self._errors[1]

    def _all_learnt(self) -> Pairs:
        guesses, lengths = (np.concatenate(each) for each in zip(*self._learnt, strict=True))
        return guesses, lengths

    def _line(self, guesses: NDArray[np.float64]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = self._offset + self._slope * guesses
        return found

    def _fit(self, guesses: NDArray[np.float64], lengths: NDArray[np.float64]) -> None:
        """Fit by least squares; the prior adds `_PRIOR_ROLLOUTS` rollouts on the line of slope 1 through the means."""
        mean_guess, mean_length = guesses.mean(), lengths.mean()
        x, y = guesses - mean_guess, lengths - mean_length
        # Without any spread, observed or expected, the slope is undetermined; this keeps it at 1.
        weight = _PRIOR_ROLLOUTS * (max(float(x.var()), self._prior**2) or 1.0)
        self._slope = (float(x @ y) + weight) / (float(x @ x) + weight)
        self._offset = float(mean_length - self._slope * mean_guess)
        rest = y - self._slope * x
        self._sigma = float(np.sqrt((rest @ rest + _PRIOR_ROLLOUTS * self._prior**2) / (rest.size + _PRIOR_ROLLOUTS)))
