"""How long episodes wait between their turns, and which are to start first because of it."""

import time
from collections.abc import Callable, Mapping, Sequence
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

_DIGITS = 4
"""Of logged seconds: a tenth of a millisecond."""


class TurnClock:
    """Notes when a run's calls are asked and answered; it waits while none is open.

    Only pauses count: of an episode that goes on at once, without waiting for a time, a file or another thread, all
    waits are exactly 0, so that what is forecast from them repeats bitwise.

    Example: a call of 8 tokens, a tool that takes 2 s and a call of 5 tokens are the turns (8, 2.0) and (5, 0.0). Calls
    that are open at the same time are one turn.
    """

    def __init__(self, num_pauses: Callable[[], int], now_s: Callable[[], float] = time.monotonic) -> None:
        """Begins the run.

        Args:
            num_pauses: how often the loop of the episodes has had nothing to run so far.
            now_s: reads a clock.
        """
        self._num_pauses, self._now_s = num_pauses, now_s
        self._turns: list[Turn] = []
        self._num_open = self._num_tokens = 0
        self._since = self._mark()

    def note_asked(self) -> None:
        """Counts a call that waits for its answer."""
        if self._num_open == 0:
            self._note_wait()
        self._num_open += 1

    def note_answered(self, num_tokens: int) -> None:
        """A call has ended with so many tokens; 0 if it was left."""
        self._num_open -= 1
        self._num_tokens += num_tokens
        if self._num_open == 0:
            self._turns.append(Turn(self._num_tokens, 0.0))
            self._num_tokens, self._since = 0, self._mark()

    def turns(self) -> tuple[Turn, ...]:
        """The turns of the run, which ends now."""
        if self._num_open == 0:
            self._note_wait()
        return tuple(self._turns)

    def _note_wait(self) -> None:
        num_pauses, since = self._since
        wait_s = round(self._now_s() - since, _DIGITS) if self._num_pauses() > num_pauses else 0.0
        if self._turns:
            self._turns[-1] = self._turns[-1]._replace(wait_s=wait_s)
        elif wait_s > 0:
            self._turns.append(Turn(0, wait_s))

    def _mark(self) -> tuple[int, float]:
        return self._num_pauses(), self._now_s()


class EpisodeForecast:
    """Sampled tokens, turns and waiting of each task's next episodes, from its latest ones.

    Where no episode has waited, the order reads no clock and repeats bitwise.

    Example: of two tasks with as many tokens, of which the second waited for a tool, the second's episodes start first.
    """

    def __init__(self) -> None:
        self._lengths = LengthPredictor(guess=1.0)
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
