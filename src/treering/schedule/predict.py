"""Predict lengths, turns and waiting of rollouts from the prompt's earlier ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treering.errors import ConfigError, InputError
from treering.schedule.turns import Turns
from treering.types import PromptId


class LengthPredictor:
    """Predicts the median of a prompt's latest rollouts, as in RhymeRL; observes every step's rollouts in order.

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
        """`guess` is predicted before the first length is observed.

        Raises:
            ConfigError: `guess` is not above 0.
        """
        if not (np.isfinite(guess) and guess > 0):
            raise ConfigError(f"the guessed length must be above 0, got guess={guess!r}; raise it")
        self._guess = float(guess)
        self._lengths: dict[PromptId, float] = {}
        self._unknown: float | None = None

    def predict(self, prompts: Sequence[PromptId], group_size: int) -> NDArray[np.float64]:
        """Predict the lengths of a step: float64 [R], a group of `group_size` equal ones for each prompt in order.

        Example: with "a" predicted at 120, "b" at 80 and "c" new, `predict(["a", "c"], 2)` is [120.0, 120.0, 100.0,
        100.0].
        """
        if self._unknown is None:
            self._unknown = float(np.median([*self._lengths.values()])) if self._lengths else self._guess
        lengths = [self._lengths.get(prompt, self._unknown) for prompt in prompts]
        return np.repeat(np.asarray(lengths, np.float64), group_size)

    def observe(self, prompt: PromptId, lengths: ArrayLike) -> None:
        """Learn the lengths of a prompt's rollouts in one step: int64 [G] >= 1.

        Raises:
            InputError: there are no lengths, or one is below 1.
        """
        taken = np.asarray(lengths)
        if taken.ndim != 1 or taken.size == 0 or taken.dtype.kind not in "iu" or taken.min() < 1:
            raise InputError(
                f"observed lengths must be integers of at least 1, got {lengths!r} for {prompt!r}; drop it"
            )
        self._lengths[prompt] = float(np.median(taken))
        self._unknown = None

    def state(self) -> dict[str, Any]:
        """Return the checkpoint state, as lists, numbers and strings: the length predicted for each prompt."""
        return {"prompts": [[prompt, [length]] for prompt, length in self._lengths.items()]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self._lengths = {prompt: float(length) for prompt, [length] in state["prompts"]}
        self._unknown = None


def make_predictor(*, max_tokens: int) -> LengthPredictor:
    """Make a predictor of rollouts of at most `max_tokens`; its first guess is half of them.

    >>> make_predictor(max_tokens=16384).predict(["a"], 1).tolist()
    [8192.0]
    """
    return LengthPredictor(guess=max_tokens / 2)


PRIOR_ROLLOUTS = 2.0
"""Weight of the prediction, in finished siblings."""


def expected_lengths(
    running: ArrayLike,
    finished: ArrayLike,
    *,
    predicted: float,
    ratios: ArrayLike,
    max_tokens: int,
) -> NDArray[np.float64]:
    """Return the expected lengths of a group's running rollouts, given that each is longer than it is now.

    This is a survival estimate (Kaplan and Meier's): finished siblings are observed lengths, running ones are censored
    at their current lengths, and the prediction times ratios from history adds lengths of a smaller weight. A rollout's
    expectation is the mean of the lengths above its current one. If there are none, or if the longest rollout is still
    running, it is twice the current length.

    Args:
        running: [U] >= 0: current tokens of the running rollouts.
        finished: [F] >= 1: lengths of the finished rollouts.
        predicted: the group's predicted length, above 0.
        ratios: [H] > 0, one or more: actual over predicted lengths of earlier rollouts, of any prompts.
        max_tokens: limit of every rollout.

    Returns:
        float64 [U], each above the current length, unless that is `max_tokens`.

    >>> expected_lengths([50, 200], [100], predicted=100.0, ratios=[1.0, 3.0], max_tokens=1000).tolist()
    [200.0, 300.0]
    """
    so_far, ended = np.asarray(running, np.float64), np.asarray(finished, np.float64)
    past_ratios = np.asarray(ratios, np.float64)
    known_lengths = np.concatenate([ended, np.clip(predicted * past_ratios, 1.0, max_tokens)])
    weights = np.concatenate([np.ones(ended.size), np.full(past_ratios.size, PRIOR_ROLLOUTS / past_ratios.size)])
    lengths, shares, rest = _survival(known_lengths, weights, so_far)
    # Rollouts that outlive all known lengths have the same expected length, since they are the longest.
    longest = max(float(lengths[-1]), float(so_far.max(initial=0.0)))
    lengths, shares = np.append(lengths, min(2.0 * longest, max_tokens)), np.append(shares, rest)
    beyond = (lengths > so_far[:, None]) * shares
    total = beyond.sum(axis=1)
    doubled = np.minimum(2.0 * np.maximum(so_far, 1.0), max_tokens)
    means = beyond @ lengths / np.where(total > 0, total, 1.0)
    return np.where(total > 0, means, doubled)


def _survival(
    known_lengths: NDArray[np.float64], weights: NDArray[np.float64], so_far: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Return the sorted lengths, the share of rollouts that ends at each, and the share beyond all."""
    lengths, inverse = np.unique(known_lengths, return_inverse=True)
    ending = np.bincount(inverse, weights=weights)
    at_risk = np.cumsum(ending[::-1])[::-1] + (so_far[:, None] >= lengths).sum(axis=0)
    going_on = np.cumprod(1.0 - ending / at_risk)
    before = np.concatenate([[1.0], going_on[:-1]])
    return lengths, before - going_on, float(going_on[-1])


class WaitPredictor:
    """Predicts the median turns and waiting of a prompt's latest rollouts; those of all prompts for a new prompt.

    Before the first rollout is observed, rollouts have one turn and no waiting.

    >>> waits = WaitPredictor()
    >>> waits.observe("a", Turns.of([[(8, 2.0), (5, 0.0)], [(8, 4.0), (3, 0.0)]]))
    >>> num_turns, wait_s = waits.predict(["a", "b"], 1)
    >>> num_turns.tolist(), wait_s.tolist()
    ([2.0, 2.0], [3.0, 3.0])
    """

    def __init__(self) -> None:
        self._memories: dict[PromptId, tuple[float, float]] = {}

    def __contains__(self, prompt: PromptId) -> bool:
        """Return whether rollouts of a prompt were observed."""
        return prompt in self._memories

    @property
    def has_waits(self) -> bool:
        """Whether a prompt's latest rollouts waited."""
        return any(wait_s > 0 for _, wait_s in self._memories.values())

    def predict(self, prompts: Sequence[PromptId], group_size: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Predict turns and seconds of waiting: float64 [R] each, a group of equal ones for each prompt in order."""
        known = np.array(list(self._memories.values())).reshape(-1, 2)
        unknown = (float(np.median(known[:, 0])), float(np.median(known[:, 1]))) if known.size else (1.0, 0.0)
        found = np.array([self._memories.get(prompt, unknown) for prompt in prompts], np.float64).reshape(-1, 2)
        return np.repeat(found[:, 0], group_size), np.repeat(found[:, 1], group_size)

    def observe(self, prompt: PromptId, turns: Turns) -> None:
        """Learn the turns of a prompt's rollouts in one step."""
        self._memories[prompt] = (float(np.median(turns.num_turns)), float(np.median(turns.total_wait_s)))

    def state(self) -> list[list[Any]]:
        """Return the checkpoint state, as lists, numbers and strings."""
        return [[prompt, *memory] for prompt, memory in self._memories.items()]

    def load_state(self, state: Sequence[Sequence[Any]]) -> None:
        """Restore a `state`."""
        self._memories = {prompt: (num_turns, wait_s) for prompt, num_turns, wait_s in state}
