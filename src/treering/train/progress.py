"""How far a running step is, phase by phase, for whoever shows it."""

from collections.abc import Callable
from typing import Literal, TypeAlias

Phase = Literal["starting", "sampling", "scoring", "training"]
"""starting: processes. sampling: rollouts. scoring: tokens of a pass without gradients, which some objectives need
first. training: distinct tokens, forward and backward."""

OnProgress: TypeAlias = Callable[[Phase, int, int], None]
"""Called with a phase, how much of it is done and how much is planned: at its start, with 0, then as it goes on, also
where nothing more is done, and at its end, when both are equal. An error in it ends the step, and the loop is then as
after the step before; part of the gradients may be there."""


class PhaseProgress:
    """Counts what is done of one phase.

    Example: `PhaseProgress("training", 100, print).add(40)` prints `training 0 100` and `training 40 100`.
    """

    def __init__(self, phase: Phase, num_planned: int, on_progress: OnProgress | None) -> None:
        """`on_progress`: called with every change; None counts for nobody. A phase of nothing is not reported."""
        self._phase = phase
        self._num_planned = num_planned
        self._on_progress = on_progress if num_planned else None
        self._num_done = 0
        self.tick()

    def add(self, count: int) -> None:
        """Counts `count` more as done."""
        self._num_done += count
        self.tick()

    def reach(self, num_done: int) -> None:
        """Counts what is left out up to `num_done`, such as partitions that train nothing."""
        if num_done > self._num_done:
            self.add(num_done - self._num_done)

    def tick(self) -> None:
        """Tells where it stands, so that whoever listens may end the step."""
        if self._on_progress is not None:
            self._on_progress(self._phase, self._num_done, self._num_planned)
