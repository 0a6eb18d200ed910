"""Predicts how many turns a prompt's next rollouts have, and how long they wait, from its latest ones."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.schedule.turns import Turns
from treering.types import PromptId


class WaitPredictor:
    """The medians of a prompt's latest rollouts; of a prompt without any, those of all prompts.

    Before anything is seen, rollouts have one turn and wait for nothing.

    >>> waits = WaitPredictor()
    >>> waits.observe("a", Turns.of([[(8, 2.0), (5, 0.0)], [(8, 4.0), (3, 0.0)]]))
    >>> num_turns, wait_s = waits.predict(["a", "b"], 1)
    >>> num_turns.tolist(), wait_s.tolist()
    ([2.0, 2.0], [3.0, 3.0])
    """

    def __init__(self) -> None:
        self._memories: dict[PromptId, tuple[float, float]] = {}

    def __contains__(self, prompt: PromptId) -> bool:
        """Whether rollouts of a prompt were seen."""
        return prompt in self._memories

    @property
    def has_waits(self) -> bool:
        """Whether a prompt's latest rollouts waited."""
        return any(wait_s > 0 for _, wait_s in self._memories.values())

    def predict(self, prompts: Sequence[PromptId], group_size: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Turns and seconds of waiting: float64 [R] each, a group of equal ones for each prompt in order."""
        seen = np.array(list(self._memories.values())).reshape(-1, 2)
        unknown = (float(np.median(seen[:, 0])), float(np.median(seen[:, 1]))) if seen.size else (1.0, 0.0)
        found = np.array([self._memories.get(prompt, unknown) for prompt in prompts], np.float64).reshape(-1, 2)
        return np.repeat(found[:, 0], group_size), np.repeat(found[:, 1], group_size)

    def observe(self, prompt: PromptId, turns: Turns) -> None:
        """Takes the turns of a prompt's rollouts in one step."""
        self._memories[prompt] = (float(np.median(turns.num_turns)), float(np.median(turns.total_wait_s)))

    def state(self) -> list[list[Any]]:
        """Checkpoint state, as lists, numbers and strings."""
        return [[prompt, *memory] for prompt, memory in self._memories.items()]

    def load_state(self, state: Sequence[Sequence[Any]]) -> None:
        """Restores a `state`."""
        self._memories = {prompt: (num_turns, wait_s) for prompt, num_turns, wait_s in state}
