"""A trace: the rollout lengths of each step and their predictions, as a simulation replays them.

R rollouts of a step, prompts in order, then samples
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError
from treering.schedule.policy import Forecast
from treering.schedule.turns import Turns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceStep:
    """The rollouts of one step.

    Example: a group of two is `TraceStep(lengths=[120, 80], forecast=Forecast(lengths=[100, 100], prompts=[0, 0]))`.
    """

    lengths: NDArray[np.int64]
    """int64 [R] >= 1: actual lengths in tokens."""
    forecast: Forecast
    """The predictions."""
    num_prompt_tokens: NDArray[np.int64] | None = None
    """int64 [R] >= 0: tokens to prefill; None means no prefill."""
    turns: Turns | None = None
    """Of the same rollouts; None if none waits."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", np.asarray(self.lengths, np.int64))
        if self.lengths.shape != self.forecast.lengths.shape or (self.lengths < 1).any():
            raise InputError(
                f"a step has a length of at least 1 for each of its {self.forecast.num_rollouts} rollouts, got "
                f"{self.lengths.shape}; leave empty rollouts out"
            )
        if self.turns is not None and not np.array_equal(self.turns.lengths, self.lengths):
            raise InputError(
                f"the turns of a rollout have its tokens, got {self.turns.lengths.tolist()[:8]} for lengths "
                f"{self.lengths.tolist()[:8]}; correct either"
            )
        if self.num_prompt_tokens is None:
            return
        object.__setattr__(self, "num_prompt_tokens", np.asarray(self.num_prompt_tokens, np.int64))
        if self.num_prompt_tokens.shape != self.lengths.shape or (self.num_prompt_tokens < 0).any():
            raise InputError(
                f"a step has a number of prompt tokens, at least 0, for each of its {self.lengths.size} rollouts, got "
                f"{self.num_prompt_tokens.shape}; give one a rollout, or None for no prefill"
            )

    @property
    def num_rollouts(self) -> int:
        """R."""
        return self.lengths.size

    @property
    def has_waits(self) -> bool:
        """Whether any rollout waits."""
        return self.turns is not None and bool(self.turns.wait_s.any())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Steps in order, and the length limit."""

    steps: tuple[TraceStep, ...]
    """At least one."""
    max_tokens: int
    """No rollout is longer."""

    def __post_init__(self) -> None:
        if not self.steps:
            raise InputError("a trace has at least one step, got none; give rollouts")
        longest = max(int(step.lengths.max()) for step in self.steps)
        if longest > self.max_tokens:
            raise InputError(f"no rollout is longer than max_tokens={self.max_tokens}, got one of {longest}; raise it")

    @property
    def has_waits(self) -> bool:
        """Whether any rollout of any step waits."""
        return any(step.has_waits for step in self.steps)
