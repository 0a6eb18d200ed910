"""Predicts the lengths of a prompt's next rollouts from its earlier ones.

`treering.schedule.predict.calibration` measures how good the predictions are.

    G rollouts of a prompt in a step, R rollouts of a step
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treering.errors import ConfigError, InputError
from treering.types import PromptId


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
"""median: of a prompt's latest rollouts, the paper's predictor. ema: a moving mean of its medians, with weight one half
on the latest. quantile: the upper quartile of its rollouts of the latest two epochs, which favours the longest ones."""

Memory: TypeAlias = list[Any]
"""What a predictor stores for a prompt: a JSON-compatible list."""

_NUM_EPOCHS, _QUANTILE = 2, 0.75


class LengthPredictor:
    """Predicts rollout lengths; observes every step's rollouts in order.

    A prompt without history gets the median of all lengths seen so far, and `guess` before there are any. Equal
    `observe` calls give equal predictions, and a loaded state continues as the saved one.

    >>> lengths = LengthPredictor("median", guess=8192)
    >>> lengths.predict(["a"], 2).tolist()
    [8192.0, 8192.0]
    >>> lengths.observe("a", [90, 100, 400])
    >>> lengths.predict(["a", "b"], 1).tolist()
    [100.0, 100.0]
    """

    def __init__(self, name: PredictorName, *, guess: float) -> None:
        """A predictor of this name.

        Args:
            name: see `PredictorName`.
            guess: predicted until something is seen; above 0.

        Raises:
            ConfigError: another name or guess.
        """
        if name not in _KINDS:
            raise ConfigError(f"lengths are predicted by {', '.join(_KINDS)}, got {name!r}; choose one")
        if not (np.isfinite(guess) and guess > 0):
            raise ConfigError(f"a length is guessed above 0 before any is seen, got guess={guess!r}; raise it")
        self.name = name
        """Name in configurations."""
        self._remember, self._length_of = _KINDS[name]
        self._guess = float(guess)
        self._seen = SeenLengths()
        self._memories: dict[PromptId, Memory] = {}

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


def _latest_median(memory: Memory | None, lengths: NDArray[np.int64]) -> Memory:
    return [float(np.median(lengths))]


def _mean_of_medians(memory: Memory | None, lengths: NDArray[np.int64]) -> Memory:
    latest = float(np.median(lengths))
    return [latest if memory is None else (latest + memory[0]) / 2]


def _latest_epochs(memory: Memory | None, lengths: NDArray[np.int64]) -> Memory:
    return [*(memory or []), lengths.tolist()][-_NUM_EPOCHS:]


def _number(memory: Memory) -> float:
    return float(memory[0])


def _quartile(memory: Memory) -> float:
    return float(np.quantile(np.concatenate(memory), _QUANTILE))


_KINDS: dict[str, tuple[Callable[[Memory | None, NDArray[np.int64]], Memory], Callable[[Memory], float]]] = {
    "median": (_latest_median, _number),
    "ema": (_mean_of_medians, _number),
    "quantile": (_latest_epochs, _quartile),
}
"""What is remembered of a prompt after more rollouts, and the prediction from it."""


def make_predictor(name: PredictorName, *, max_tokens: int, guess: float | None = None) -> LengthPredictor:
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
    return LengthPredictor(name, guess=max_tokens / 2 if guess is None else guess)
