"""The report of one supervised training step, under the names of `treering.metrics`."""

from dataclasses import dataclass

from treering import metrics
from treering.train.loop.update import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The report of one step.

    Attributes:
        step: its number, from 1.
        epoch: completed passes over the tasks.
        seconds: wall time of the step.
        update: the optimizer update.
    """

    step: int
    epoch: int
    seconds: float
    update: Update

    def values(self) -> dict[str, float]:
        """Values under the names of `treering.metrics`."""
        return self.update.values() | {
            metrics.EPOCH: self.epoch,
            metrics.STEP_S: self.seconds,
            metrics.TOKENS_PER_S: self.update.num_branch_tokens / self.seconds,
        }
