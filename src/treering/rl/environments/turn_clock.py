"""The turns of a run: how many tokens it sampled at a stretch, and how long it then waited before it asked again."""

import time
from collections.abc import Callable

from treering.data.episode import Turn

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
        """A call is asked."""
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
