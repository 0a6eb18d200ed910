"""Predicts the lengths of a prompt's next rollouts from its latest ones.

`treering.schedule.predict.calibration` measures how good the predictions are.

    G rollouts of a prompt in a step, R rollouts of a step
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treering.errors import ConfigError, InputError
from treering.types import PromptId


class LengthPredictor:
    """The median of a prompt's latest rollouts, as in RhymeRL; observes every step's rollouts in order.

    A prompt without history gets the median of the predictions for all others, and `guess` before there are any.
    Equal `observe` calls give equal predictions, and a loaded state continues as the saved one.

    >>> lengths = LengthPredictor(guess=8192)
    >>> lengths.predict(["a"], 2).tolist()
    [8192.0, 8192.0]
    >>> lengths.observe("a", [90, 100, 400])
    >>> lengths.predict(["a", "b"], 1).tolist()
    [100.0, 100.0]
    """

    def __init__(self, *, guess: float) -> None:
        """`guess`: predicted until something is seen; above 0.

        Raises:
            ConfigError: another guess.
        """
        if not (np.isfinite(guess) and guess > 0):
            raise ConfigError(f"a length is guessed above 0 before any is seen, got guess={guess!r}; raise it")
        self._guess = float(guess)
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
        self._lengths[prompt] = float(np.median(taken))
        self._unknown = None

    def state(self) -> dict[str, Any]:
        """Checkpoint state, as lists, numbers and strings: of each prompt, what it is predicted from."""
        return {"prompts": [[prompt, [length]] for prompt, length in self._lengths.items()]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a `state`."""
        self._lengths = {prompt: float(length) for prompt, [length] in state["prompts"]}
        self._unknown = None


def make_predictor(*, max_tokens: int) -> LengthPredictor:
    """A new predictor of rollouts of at most `max_tokens`: it guesses half of them before any length is seen.

    >>> make_predictor(max_tokens=16384).predict(["a"], 1).tolist()
    [8192.0]
    """
    return LengthPredictor(guess=max_tokens / 2)
