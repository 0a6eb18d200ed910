"""The order in which a step's episodes start: the longest expected span first, once earlier epochs tell how long."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.data.episode import Turn
from treering.rl.collect import Group
from treering.schedule.plan.plans import longest_first
from treering.schedule.predict.lengths import LengthPredictor
from treering.schedule.predict.waits import WaitPredictor
from treering.schedule.turns import Turns
from treering.types import PromptId


class EpisodeForecast:
    """Sampled tokens, turns and waiting of each task's next episodes, from its latest ones.

    Where no episode has waited, the order reads no clock and repeats bitwise.

    Example: of two tasks with as many tokens, of which the second waited for a tool, the second's episodes start first.
    """

    def __init__(self) -> None:
        self._lengths = LengthPredictor("median", guess=1.0)
        self._waits = WaitPredictor()
        self._token_s = 0.0

    def order(self, prompts: Sequence[PromptId], group_size: int) -> list[int]:
        """The numbers of a step's episodes, tasks in order and then samples, as they should start.

        As they stand if nothing is known of any task.
        """
        if not any(prompt in self._waits for prompt in prompts):
            return list(range(len(prompts) * group_size))
        spans, (_, wait_s) = self._lengths.predict(prompts, group_size), self._waits.predict(prompts, group_size)
        if self._waits.has_waits:
            spans = spans * self._token_s + wait_s
        order: NDArray[np.int64] = longest_first(spans, np.repeat(np.arange(len(prompts)), group_size))
        return order.tolist()  # type: ignore[no-any-return]

    def note_pace(self, token_s: float) -> None:
        """Takes the seconds that a token of a running call took in the latest step."""
        self._token_s = token_s

    def observe(self, groups: Sequence[Group]) -> None:
        """Takes the groups of a step."""
        found: dict[PromptId, list[tuple[Turn, ...]]] = {}
        for group in groups:
            episodes = () if group.runs is None else group.runs.episodes
            found.setdefault(group.prompt.prompt_id, []).extend(turns for turns in episodes if turns)
        for prompt_id, own in found.items():
            if own:
                turns = Turns.of(own)
                self._lengths.observe(prompt_id, np.maximum(turns.lengths, 1))
                self._waits.observe(prompt_id, turns)

    def state(self) -> dict[str, Any]:
        """Checkpoint state, as lists, numbers and strings."""
        return {"lengths": self._lengths.state(), "waits": self._waits.state(), "token_s": self._token_s}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a `state`."""
        self._lengths.load_state(state["lengths"])
        self._waits.load_state(state["waits"])
        self._token_s = state["token_s"]
