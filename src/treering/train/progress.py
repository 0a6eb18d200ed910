"""Progress of a running step, phase by phase, for a display."""

from collections.abc import Callable
from typing import Literal, TypeAlias

Phase = Literal["starting", "sampling", "scoring", "training"]
"""starting: processes. sampling: rollouts. scoring: tokens of a pass without gradients, which some objectives need
first. training: distinct tokens, forward and backward."""

OnProgress: TypeAlias = Callable[[Phase, int, int], None]
"""Callback with a phase, the amount done and the total. It is called at the start of a phase with 0, during it
even without progress, and at its end, when both are equal. An error in it ends the step and leaves the loop as after
the previous step; part of the gradients may have been added."""


class PhaseProgress:
    """Counter of the work done in one phase.

    Example: `PhaseProgress("training", 100, print).add(40)` prints `training 0 100` and `training 40 100`.
    """

    def __init__(self, phase: Phase, num_total: int, on_progress: OnProgress | None) -> None:
        """Start a phase; `on_progress` gets every change unless it is None. An empty phase is not reported."""
        self._phase = phase
        self._num_total = num_total
        self._on_progress = on_progress if num_total else None
        self._num_done = 0
        self.tick()

    def add(self, count: int) -> None:
        """Count `count` more items as done."""
        self._num_done += count
        self.tick()

    def reach(self, num_done: int) -> None:
        """Count the rest up to `num_done`, such as skipped partitions, as done."""
        if num_done > self._num_done:
            self.add(num_done - self._num_done)

    def tick(self) -> None:
        """Report the current state, so that the callback can end the step."""
        if self._on_progress is not None:
            self._on_progress(self._phase, self._num_done, self._num_total)
