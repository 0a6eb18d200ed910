"""When a run saves, what that costs, and what is saved of a step that a signal ends."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic

from treering.errors import Interrupted, StateError
from treering.train.loop.checkpoint import CheckpointStore
from treering.train.loop.interruption import Interruption
from treering.train.loop.restore import random_state, set_random_state
from treering.train.loop.resumable import ReportT, Resumable

MAX_SHARE = 0.05
"""Saving by time takes at most about this share of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint and its cost.

    Attributes:
        step: after which it was saved.
        seconds: that saving took.
        num_bytes: on disk.
        wait_s: until the next one is due, by time; None where steps count.
    """

    step: int
    seconds: float
    num_bytes: int
    wait_s: float | None


class Saver(Generic[ReportT]):
    """Runs the steps of a loop, and saves it when that is due or a signal ends the run.

    Example: with `timedelta(minutes=10)`, ten minutes lie between two saves of 0.4 s, and nineteen between two of 60 s.
    """

    def __init__(
        self,
        loop: Resumable[ReportT],
        checkpoints: CheckpointStore,
        every: int | timedelta | None,
        interruption: Interruption | None,
        on_saved: Callable[[Saved], None] | None,
    ) -> None:
        """See `run_steps`; the loop is in the state of its newest checkpoint."""
        self._loop = loop
        self._checkpoints = checkpoints
        self._every = every
        self._interruption = interruption
        self._on_saved = on_saved
        self._step = loop.num_steps_done
        self._ended_s = time.monotonic()
        self._seconds = 0.0
        if interruption is not None:
            interruption.has_unsaved = lambda: loop.num_steps_done > self._step

    def step(self) -> ReportT:
        """Does the next step. If a signal ends it, saves the state after the last whole one.

        Raises:
            Interrupted: a signal ended the run; a note says which step is saved.
        """
        # Weights and optimizer change when a step is complete, but what it draws is gone at once.
        random = random_state()
        try:
            if self._interruption is not None:
                self._interruption.check_together()
            return self._loop.step()
        except Interrupted as error:
            self._keep(random, error)
            raise
        except Exception as error:
            # Ctrl-C reaches processes of an engine too, which may fail before the step can be dropped.
            if self._interruption is None or not self._interruption.is_requested or self._checkpoints.group.size > 1:
                raise
            interrupted = self._interruption.as_error()
            try:
                self._keep(random, interrupted)
            except StateError:
                # The loop cannot be saved after an error.
                raise error from None
            raise interrupted from error

    def _keep(self, random: dict[str, Any], error: Interrupted) -> None:
        """Saves the state after the last whole step, unless it is saved; notes which one that is."""
        if self._loop.num_steps_done > self._step:
            self._loop.model.zero_grad(set_to_none=True)
            set_random_state(random)
            self.save()
        error.add_note(f"step {self._step} is saved and {self._step + 1} is next" if self._step else "no step is done")

    def save_if_due(self, *, is_last: bool) -> None:
        """Saves after the last step, and when `every` says so."""
        if is_last or self._is_due():
            self.save()

    def save(self) -> None:
        """Saves the loop."""
        began_s = time.monotonic()
        folder = self._checkpoints.save(self._loop)
        self._ended_s = time.monotonic()
        self._seconds, self._step = self._ended_s - began_s, self._loop.num_steps_done
        if self._on_saved is not None:
            wait_s = self._wait_s(self._every) if isinstance(self._every, timedelta) else None
            num_bytes = _size_of(folder)
            self._on_saved(Saved(step=self._step, seconds=self._seconds, num_bytes=num_bytes, wait_s=wait_s))

    def _is_due(self) -> bool:
        if not isinstance(self._every, timedelta):
            return self._every is not None and self._loop.num_steps_done % self._every == 0
        is_due = time.monotonic() >= self._ended_s + self._wait_s(self._every)
        # The clock of the first rank counts for all.
        return bool(self._checkpoints.group.gather(is_due)[0])

    def _wait_s(self, every: timedelta) -> float:
        return max(every.total_seconds(), self._seconds * (1.0 / MAX_SHARE - 1.0))


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
