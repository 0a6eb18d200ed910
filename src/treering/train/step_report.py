"""What one optimizer step did, as numbers.

Knows the names under which metrics are logged. Knows nothing of sinks, and nothing here is ever read back by a run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treering import metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one optimizer step did.

    Attributes:
        step: its number, from 1.
        epoch: passes over the tasks before it.
        loss: the objective before the update.
        grad_norm: global L2 norm before clipping.
        learning_rate: used by the update.
        num_trees: tasks.
        num_branches: sequences.
        num_loss_tokens: trained tokens, counted by branches (as the loss's denominator counts them).
        num_branch_tokens: flat tokens.
        num_tokens: tokens that were computed; with layout "packed" all flat ones.
        num_micro_batches: forwards.
        seconds: wall time of the step.
        peak_memory_bytes: most that torch has held on the CUDA device so far; None on CPU.
        metrics: averages of the objective's own metrics.
    """

    step: int
    epoch: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_trees: int
    num_branches: int
    num_loss_tokens: float
    num_branch_tokens: int
    num_tokens: int
    num_micro_batches: int
    seconds: float
    peak_memory_bytes: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def sharing(self) -> float:
        """1 - computed / flat tokens."""
        return 1.0 - self.num_tokens / self.num_branch_tokens

    def values(self) -> dict[str, float]:
        """The report under the names of `treering.metrics`."""
        own: dict[str, float] = {f"train/{name}": value for name, value in self.metrics.items()}
        if self.peak_memory_bytes is not None:
            own[metrics.PEAK_MEMORY_BYTES] = self.peak_memory_bytes
        return own | {
            metrics.LOSS: self.loss,
            metrics.GRAD_NORM: self.grad_norm,
            metrics.LEARNING_RATE: self.learning_rate,
            metrics.EPOCH: self.epoch,
            metrics.NUM_TREES: self.num_trees,
            metrics.NUM_BRANCHES: self.num_branches,
            metrics.NUM_LOSS_TOKENS: self.num_loss_tokens,
            metrics.NUM_BRANCH_TOKENS: self.num_branch_tokens,
            metrics.NUM_TOKENS: self.num_tokens,
            metrics.SHARING: self.sharing,
            metrics.STEP_S: self.seconds,
            metrics.TOKENS_PER_S: self.num_branch_tokens / self.seconds,
        }
