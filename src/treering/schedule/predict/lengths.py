"""Predicts the lengths of a prompt's next rollouts from its earlier ones.

`treering.schedule.predict.calibration` measures how good the predictions are.

    G rollouts of a prompt in a step, R rollouts of a step
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treering.errors import ConfigError, InputError
from treering.types import PromptId, is_count


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


PredictorName: TypeAlias = Literal["median", "ema", "quantile"]
"""The available predictors."""

Memory: TypeAlias = list[Any]
"""What a predictor stores for a prompt: a JSON-compatible list."""


class LengthPredictor(ABC):
    """Predicts rollout lengths; observes every step's rollouts in order.

    A prompt without history gets the median of all lengths seen so far, and `guess` before there are any. Equal
    `observe` calls give equal predictions, and a loaded state continues as the saved one.
    """

    def __init__(self, *, guess: float) -> None:
        """`guess`: predicted until something is seen; above 0."""
        if not (np.isfinite(guess) and guess > 0):
            raise ConfigError(f"a length is guessed above 0 before any is seen, got guess={guess!r}; raise it")
        self._guess = float(guess)
        self._seen = SeenLengths()
        self._memories: dict[PromptId, Memory] = {}

    @property
    @abstractmethod
    def name(self) -> str:
        """Name in configurations."""

    @abstractmethod
    def _remember(self, memory: Memory | None, lengths: NDArray[np.int64]) -> Memory:
        """The memory of a prompt after G more rollouts; None is a prompt's first time."""

    @abstractmethod
    def _length_of(self, memory: Memory) -> float:
        """The prediction for a prompt with this memory."""

    def predict(self, prompts: Sequence[PromptId], group_size: int) -> NDArray[np.float64]:
        """Predicted lengths of a step: float64 [R], a group of `group_size` equal ones for each prompt in order.

        Example: with "a" predicted at 120 and "b" new, all seen so far having a median of 100, `predict(["a", "b"], 2)`
        is [120.0, 120.0, 100.0, 100.0].
        """
        unknown = self._seen.median(default=self._guess)
        memories = [self._memories.get(prompt) for prompt in prompts]
        lengths = [unknown if memory is None else self._length_of(memory) for memory in memories]
        return np.repeat(np.asarray(lengths, np.float64), group_size)

    def observe(self, prompt: PromptId, lengths: ArrayLike) -> None:
        """Takes the lengths of a prompt's rollouts in one step: int64 [G] >= 1.

        Raises:
            InputError: no lengths, or one below 1.
        """
        taken = np.asarray(lengths)
        if taken.ndim != 1 or taken.size == 0 or taken.dtype.kind not in "iu" or taken.min() < 1:
            raise InputError(
                f"observed lengths are whole numbers from 1 on, got {lengths!r} for {prompt!r}; leave it out"
            )
        taken = taken.astype(np.int64)
        self._memories[prompt] = self._remember(self._memories.get(prompt), taken)
        self._seen.add(taken)

    def state(self) -> dict[str, Any]:
        """Checkpoint state, as lists, numbers and strings."""
        memories = [[prompt, list(memory)] for prompt, memory in self._memories.items()]
        return {"name": self.name, "seen": self._seen.state(), "prompts": memories}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a `state` of a predictor of the same name.

        Raises:
            InputError: a state of another predictor.
        """
        if state.get("name") != self.name:
            raise InputError(
                f"predictor {self.name} resumes from its own state, got {state.get('name')!r}'s; keep the setting"
            )
        self._seen.load_state(state["seen"])
        self._memories = {prompt: list(memory) for prompt, memory in state["prompts"]}


class MedianLengths(LengthPredictor):
    """The median of a prompt's latest rollouts: the paper's predictor.

    >>> lengths = MedianLengths(guess=8192)
    >>> lengths.predict(["a"], 2).tolist()
    [8192.0, 8192.0]
    >>> lengths.observe("a", [90, 100, 400])
    >>> lengths.predict(["a", "b"], 1).tolist()
    [100.0, 100.0]
    """

    @property
    def name(self) -> str:
        """It is "median"."""
        return "median"

    def _remember(self, memory: Memory | None, lengths: NDArray[np.int64]) -> Memory:
        return [float(np.median(lengths))]

    def _length_of(self, memory: Memory) -> float:
        return float(memory[0])


class EmaLengths(LengthPredictor):
    """An exponential moving average of a prompt's medians: steadier than the latest median if rollouts vary.

    >>> lengths = EmaLengths(guess=8192, alpha=0.5)
    >>> lengths.observe("a", [100])
    >>> lengths.observe("a", [200])
    >>> lengths.predict(["a"], 1).tolist()
    [150.0]
    """

    def __init__(self, *, guess: float, alpha: float = 0.5) -> None:
        """`alpha`: share of the latest median in the mean, in (0, 1]."""
        super().__init__(guess=guess)
        if not 0 < alpha <= 1:
            raise ConfigError(f"alpha is the share of the latest median, in (0, 1], got {alpha!r}; correct it")
        self._alpha = alpha

    @property
    def name(self) -> str:
        """It is "ema"."""
        return "ema"

    def _remember(self, memory: Memory | None, lengths: NDArray[np.int64]) -> Memory:
        latest = float(np.median(lengths))
        return [latest if memory is None else self._alpha * latest + (1 - self._alpha) * memory[0]]

    def _length_of(self, memory: Memory) -> float:
        return float(memory[0])


class QuantileLengths(LengthPredictor):
    """A quantile of a prompt's rollouts of the latest epochs: above one half it favours the longest ones.

    >>> lengths = QuantileLengths(guess=8192, quantile=0.75, num_epochs=2)
    >>> for rollouts in ([900, 950], [100, 200], [300, 400, 500]):
    ...     lengths.observe("a", rollouts)
    >>> lengths.predict(["a"], 1).tolist()
    [400.0]
    """

    def __init__(self, *, guess: float, quantile: float = 0.75, num_epochs: int = 2) -> None:
        """`quantile`: share of rollouts to cover, in [0, 1]; `num_epochs`: latest epochs of a prompt that count."""
        super().__init__(guess=guess)
        if not 0 <= quantile <= 1 or not is_count(num_epochs, least=1):
            raise ConfigError(
                f"a quantile lies in [0, 1], of one epoch or more, got {quantile!r} of {num_epochs!r}; correct it"
            )
        self._quantile = quantile
        self._num_epochs = num_epochs

    @property
    def name(self) -> str:
        """It is "quantile"."""
        return "quantile"

    def _remember(self, memory: Memory | None, lengths: NDArray[np.int64]) -> Memory:
        return [*(memory or []), lengths.tolist()][-self._num_epochs :]

    def _length_of(self, memory: Memory) -> float:
        return float(np.quantile(np.concatenate(memory), self._quantile))


def make_predictor(name: str, *, max_tokens: int, guess: float | None = None) -> LengthPredictor:
    """A new predictor with its usual settings.

    Args:
        name: of `PredictorName`.
        max_tokens: tokens of a rollout at most.
        guess: predicted before any length is seen; None is half of `max_tokens`.

    Raises:
        ConfigError: an unknown name.

    >>> make_predictor("median", max_tokens=16384).predict(["a"], 1).tolist()
    [8192.0]
    """
    first = max_tokens / 2 if guess is None else guess
    for kind in (MedianLengths, EmaLengths, QuantileLengths):
        predictor: LengthPredictor = kind(guess=first)
        if predictor.name == name:
            return predictor
    raise ConfigError(f"lengths are predicted by {', '.join(get_args(PredictorName))}, got {name!r}; choose one")
