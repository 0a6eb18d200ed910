"""The report of one supervised training step, under the names of `treering.metrics`."""

from dataclasses import dataclass

from treering import metrics
from treering.train.loop.update import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did.

    Attributes:
        step: its number, from 1.
        epoch: passes over the tasks before it.
        seconds: wall time of the step.
        update: what was trained.
    """

    step: int
    epoch: int
    seconds: float
    update: Update

    def values(self) -> dict[str, float]:
        """The report under the names of `treering.metrics`."""
        return self.update.values() | {
            metrics.EPOCH: self.epoch,
            metrics.STEP_S: self.seconds,
            metrics.TOKENS_PER_S: self.update.num_branch_tokens / self.seconds,
        }
