"""Corrects length predictions by the errors of earlier ones.

R rollouts of a step
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from treering.schedule.policy import NUM_LEARNT
from treering.schedule.predict.errors import PredictionErrors

Pairs = tuple[NDArray[np.float64], NDArray[np.float64]]

PRIOR_SIGMA = 0.25
"""Sigma of log(length / prediction) before any step was seen."""

PRIOR_SPREAD = 0.7
"""Sigma of log lengths within a step before any step was seen: if predictions vary less, the rest is unexplained."""

_PRIOR_ROLLOUTS = 16
"""Weight of the prior in rollouts; the prior trusts predictions unchanged."""

_MAX_ROLLOUTS = 4096
"""Rollouts kept of one step, evenly spaced."""


class CalibratedLengths:
    """A line fitted to log lengths against log predictions, and the errors around it.

    It corrects predictions that are too long by a factor, reverses reversed ones, and maps useless ones to one length.

    Example: after a step with predictions [100, 200, 400] and lengths [50, 100, 200], many times each, a prediction of
    300 is corrected to 150.
    """

    def __init__(self, sigma: float = PRIOR_SIGMA) -> None:
        """`sigma`: of log(length / prediction), before any step was seen."""
        self._prior = sigma
        self._seen: deque[Pairs] = deque(maxlen=NUM_LEARNT)
        self._slope, self._offset, self._sigma = 1.0, 0.0, sigma
        self._misses: tuple[int, PredictionErrors] | None = None

    @property
    def has_seen(self) -> bool:
        """Whether any step was seen."""
        return bool(self._seen)

    def learn(self, predicted: NDArray[np.float64], lengths: NDArray[np.int64]) -> None:
        """Takes a step's predicted and actual lengths, float64 and int64 [R]."""
        chosen = np.unique(np.linspace(0, lengths.size - 1, _MAX_ROLLOUTS).astype(np.int64))
        self._seen.append((np.log(predicted[chosen]), np.log(lengths[chosen])))
        told, real = (np.concatenate(each) for each in zip(*self._seen, strict=True))
        self._fit(told, real)
        self._misses = None

    def lengths(self, predicted: NDArray[np.float64], max_tokens: int) -> NDArray[np.float64]:
        """float64 [R]: the likeliest lengths, at least 1 and at most `max_tokens`."""
        return np.clip(np.exp(self._line(np.log(predicted))), 1.0, max_tokens)

    def draw(self, predicted: NDArray[np.float64], max_tokens: int, random: np.random.Generator) -> NDArray[np.float64]:
        """float64 [R]: sampled lengths, at least 1 and at most `max_tokens`.

        Errors around the line are sampled from those of similar predictions (see `PredictionErrors`). They are
        log-normal before any step was seen, and later with the prior's share.

        Example: where of rollouts that were predicted 1,000 a fifth ended at 300, a fifth of the next ones does.
        """
        told = np.log(predicted)
        errors = self.sigma(predicted) * random.standard_normal(told.size)
        if self.has_seen:
            num_seen = sum(pair[0].size for pair in self._seen)
            is_prior = random.random(told.size) * (num_seen + _PRIOR_ROLLOUTS) < _PRIOR_ROLLOUTS
            errors = np.where(is_prior, errors, self._misses_with(max_tokens).draw(told, random))
        return np.clip(np.exp(self._line(told) + errors), 1.0, max_tokens)

    def sigma(self, predicted: NDArray[np.float64]) -> float:
        """Sigma of the log lengths of these rollouts around their corrected predictions."""
        if self.has_seen:
            return self._sigma
        unexplained = PRIOR_SPREAD**2 - float(np.log(predicted).var())
        return max(self._prior, float(np.sqrt(max(unexplained, 0.0))))

    def _misses_with(self, max_tokens: int) -> PredictionErrors:
        """Errors of all seen rollouts; those of rollouts cut at `max_tokens` are infinite."""
        if self._misses is None or self._misses[0] != max_tokens:
            told, real = (np.concatenate(each) for each in zip(*self._seen, strict=True))
            errors = np.where(real < np.log(max_tokens), real - self._line(told), np.inf)
            self._misses = max_tokens, PredictionErrors(told, errors)
        return self._misses[1]

    def _line(self, told: NDArray[np.float64]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = self._offset + self._slope * told
        return found

    def _fit(self, told: NDArray[np.float64], real: NDArray[np.float64]) -> None:
        """Least squares, with the prior as so many rollouts on the line of slope 1 through the means."""
        mean_told, mean_real = told.mean(), real.mean()
        x, y = told - mean_told, real - mean_real
        # Without any spread, seen or expected, the slope is undetermined; this keeps it at 1.
        weight = _PRIOR_ROLLOUTS * (max(float(x.var()), self._prior**2) or 1.0)
        self._slope = (float(x @ y) + weight) / (float(x @ x) + weight)
        self._offset = float(mean_real - self._slope * mean_told)
        rest = y - self._slope * x
        self._sigma = float(np.sqrt((rest @ rest + _PRIOR_ROLLOUTS * self._prior**2) / (rest.size + _PRIOR_ROLLOUTS)))
