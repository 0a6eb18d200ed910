"""The summary of a call of `treering sft`, as fields and as a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table

from treering.cli.display.tables import facts_table
from treering.train.loop.resumable import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSummary:
    """What a call of `treering sft` did; figures cover the steps of this call, not those it resumed from."""

    run_dir: str
    data: Literal["files", "generated"]
    """"files", or "generated" for the stand-in."""
    num_tasks: int
    num_parameters: int
    resumed_from_step: int | None
    """Steps that an earlier call had done; None for a new run."""
    num_steps: int
    """Steps of the whole run."""
    first_loss: float | None
    """Loss of this call's first step; None if no step was left."""
    last_loss: float | None
    seconds: float
    flat_tokens: int
    unique_tokens: int
    sharing: float
    num_micro_batches: int
    """Forward passes; more than steps if the trees of a step do not fit `max_batch_tokens` together."""
    flat_tokens_per_s: float
    unique_tokens_per_s: float
    checkpoint: str
    """Folder of the last checkpoint; `AutoModelForCausalLM.from_pretrained` loads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftTotals:
    """Sums over the steps of one call; zeros without losses if there was no step."""

    first_loss: float | None
    last_loss: float | None
    seconds: float
    flat_tokens: int
    unique_tokens: int
    num_micro_batches: int

    @property
    def sharing(self) -> float:
        """1 - unique / flat tokens; 0.0 without a step."""
        return 1.0 - self.unique_tokens / self.flat_tokens if self.flat_tokens else 0.0

    def per_second(self, num_tokens: int) -> float:
        """Tokens per second of training; 0.0 without a step."""
        return num_tokens / self.seconds if self.seconds else 0.0


def totals(reports: Sequence[StepReport]) -> SftTotals:
    """Adds up step reports.

    Example: steps of 10 and 20 flat and 5 and 10 computed tokens have 30 flat tokens and a sharing of 0.5.
    """
    return SftTotals(
        first_loss=reports[0].update.loss if reports else None,
        last_loss=reports[-1].update.loss if reports else None,
        seconds=sum(report.seconds for report in reports),
        flat_tokens=sum(report.update.num_branch_tokens for report in reports),
        unique_tokens=sum(report.update.num_tokens for report in reports),
        num_micro_batches=sum(report.update.num_micro_batches for report in reports),
    )


def as_table(summary: SftSummary) -> Table:
    """The summary for a terminal."""
    rows = {
        "data": f"{summary.data}, {summary.num_tasks} tasks",
        "model": f"{summary.num_parameters:,} parameters",
        "steps": _steps_cell(summary),
        "loss": _loss_cell(summary),
        "seconds": f"{summary.seconds:,.1f}",
        "flat tokens": f"{summary.flat_tokens:,} ({summary.flat_tokens_per_s:,.0f} per second)",
        "unique tokens": f"{summary.unique_tokens:,} ({summary.unique_tokens_per_s:,.0f} per second)",
        "sharing": f"{summary.sharing:.3f}",
        "micro-batches": f"{summary.num_micro_batches:,}",
        "checkpoint": summary.checkpoint,
    }
    return facts_table(f"treering sft: {summary.run_dir}", rows)


def _loss_cell(summary: SftSummary) -> str:
    if summary.first_loss is None:
        return "-"
    if summary.num_steps - (summary.resumed_from_step or 0) == 1:
        return f"{summary.first_loss:.3f} (one step)"
    return f"{summary.first_loss:.3f} -> {summary.last_loss:.3f}"


def _steps_cell(summary: SftSummary) -> str:
    if summary.resumed_from_step is None:
        return str(summary.num_steps)
    return f"{summary.num_steps}, resumed after {summary.resumed_from_step}"
