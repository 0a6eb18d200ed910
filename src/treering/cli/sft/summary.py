"""The summary of a call of `treering sft`, as fields and as a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from transformers import PreTrainedModel

from treering.cli.corpus import Corpus
from treering.cli.display.tables import facts_table
from treering.config import SftConfig
from treering.train.loop.checkpoint import checkpoint_path
from treering.train.loop.resumable import StepReport
from treering.train.loop.run import CHECKPOINTS_FOLDER, Opened


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
    """1 - unique / flat tokens; 0.0 without a step."""
    num_micro_batches: int
    """Forward passes; more than steps if the trees of a step do not fit `max_batch_tokens` together."""
    flat_tokens_per_s: float
    unique_tokens_per_s: float
    checkpoint: str
    """Folder of the last checkpoint; `AutoModelForCausalLM.from_pretrained` loads it."""


def summary_of(
    config: SftConfig, corpus: Corpus, model: PreTrainedModel, opened: Opened, reports: Sequence[StepReport]
) -> SftSummary:
    """Adds up the steps of a call."""
    flat = sum(report.update.num_branch_tokens for report in reports)
    unique = sum(report.update.num_tokens for report in reports)
    seconds = sum(report.seconds for report in reports)
    last_step = reports[-1].step if reports else opened.step
    return SftSummary(
        run_dir=str(config.run.dir),
        data=corpus.source,
        num_tasks=len(corpus.tasks),
        num_parameters=model.num_parameters(),
        resumed_from_step=opened.resume_step,
        num_steps=last_step,
        first_loss=reports[0].update.loss if reports else None,
        last_loss=reports[-1].update.loss if reports else None,
        seconds=seconds,
        flat_tokens=flat,
        unique_tokens=unique,
        sharing=1.0 - unique / flat if flat else 0.0,
        num_micro_batches=sum(report.update.num_micro_batches for report in reports),
        flat_tokens_per_s=flat / seconds if seconds else 0.0,
        unique_tokens_per_s=unique / seconds if seconds else 0.0,
        checkpoint=str(checkpoint_path(config.run.dir / CHECKPOINTS_FOLDER, last_step)),
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
