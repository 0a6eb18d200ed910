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

PredictorName: TypeAlias = Literal["median", "ema", "quantile"]
"""median: of a prompt's latest rollouts, the paper's predictor. ema: a moving mean of its medians, with weight one half
on the latest. quantile: the upper quartile of its rollouts of the latest two epochs, which favours the longest ones."""

Memory: TypeAlias = list[Any]
"""What a predictor stores for a prompt: a JSON-compatible list."""

_NUM_EPOCHS, _QUANTILE = 2, 0.75


class LengthPredictor:
    """Predicts rollout lengths; observes every step's rollouts in order.

    A prompt without history gets the median of the predictions for all others, and `guess` before there are any.
    Equal `observe` calls give equal predictions, and a loaded state continues as the saved one.

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
        self._memories: dict[PromptId, Memory] = {}
        self._lengths: dict[PromptId, float] = {}
        self._unknown: float | None = None

    def predict(self, prompts: Sequence[PromptId], group_size: int) -> NDArray[np.float64]:
        """Predicted lengths of a step: float64 [R], a group of `group_size` equal ones for each prompt in order.

        Example: with "a" predicted at 120, "b" at 80 and "c" new, `predict(["a", "c"], 2)` is [120.0, 120.0, 100.0,
        100.0].
        """
        if self._unknown is None:
            self._unknown = float(np.median([*self._lengths.values()])) if self._lengths else self._guess
        lengths = [self._lengths.get(prompt, self._unknown) for prompt in prompts]
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
        self._memories[prompt] = self._remember(self._memories.get(prompt), taken.astype(np.int64))
        self._lengths[prompt] = self._length_of(self._memories[prompt])
        self._unknown = None

    def state(self) -> dict[str, Any]:
        """Checkpoint state, as lists, numbers and strings."""
        memories = [[prompt, list(memory)] for prompt, memory in self._memories.items()]
        return {"name": self.name, "prompts": memories}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a `state` of a predictor of the same name.

        Raises:
            InputError: a state of another predictor.
        """
        if state.get("name") != self.name:
            raise InputError(
                f"predictor {self.name} resumes from its own state, got {state.get('name')!r}'s; keep the setting"
            )
        self._memories = {prompt: list(memory) for prompt, memory in state["prompts"]}
        self._lengths = {prompt: self._length_of(memory) for prompt, memory in self._memories.items()}
        self._unknown = None


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
