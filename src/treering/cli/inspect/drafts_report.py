"""The report of `treering inspect --drafts`: its records, JSON and tables.

The speedup follows from counts and an assumed cost of verifying a drafted token.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from rich.console import Console
from rich.table import Table

from treering.analysis.replay import Drafted, Look
from treering.cli.display.tables import figures_table

LOOKS: tuple[Look, ...] = get_args(Look)
NAMES: dict[Look, str] = {
    "all": "all sources",
    "history": "history, own text",
    "other_prompt": "another prompt's",
    "own": "own text",
}
"""Another prompt's history, with the own text, is the control."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedDrafts:
    """What a run logged about the drafts of an epoch, summed over its steps."""

    tokens_per_forward: float
    acceptance: float | None
    """None if nothing was drafted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochDrafts:
    """One epoch; in file order, the rollouts with this many earlier ones of their prompt."""

    epoch: int
    num_rollouts: int
    drafted: dict[Look, Drafted]
    run: LoggedDrafts | None
    """What the run itself logged; None if it did not."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftsReport:
    """A replayed recording."""

    source: str
    order: Literal["epochs", "file"]
    """What counts as earlier: the epochs in the file, or the lines before."""
    num_rollouts: int
    num_recorded: int
    """Rollouts before sampling."""
    num_prompts: int
    num_with_history: int
    """Rollouts whose prompt has one in an earlier epoch."""
    verify_cost: float
    """Assumed cost of verifying a drafted token, as a share of a decoding step."""
    epochs: tuple[EpochDrafts, ...]

    def total(self, look: Look, epochs: Iterable[EpochDrafts] | None = None) -> Drafted:
        """Sums over epochs, by default all of them."""
        parts = [epoch.drafted[look] for epoch in (self.epochs if epochs is None else epochs)]
        return Drafted(**{name: sum(getattr(part, name) for part in parts) for name in Drafted.__slots__})

    def speedup(self, drafted: Drafted) -> float:
        """Predicted speedup of decoding.

        Example: 100 tokens in 40 steps with 100 drafted ones at a cost of 0.1 take the time of 50 steps: 2.0.
        """
        return drafted.num_tokens / (drafted.num_steps + self.verify_cost * drafted.num_drafted)


def as_json(report: DraftsReport) -> str:
    """The report as one JSON object; `drafted` sums over the epochs, `later` leaves the first one out."""
    later = report.epochs[1:]

    def figures(drafted: Drafted) -> dict[str, Any]:
        counts = asdict(drafted) | {"tokens_per_step": drafted.tokens_per_step, "acceptance": drafted.acceptance}
        return counts | {"speedup": report.speedup(drafted)}

    names = ("source", "order", "num_rollouts", "num_recorded", "num_prompts", "num_with_history", "verify_cost")
    record = {name: getattr(report, name) for name in names} | {
        "num_tokens": report.total("all").num_tokens,
        "drafted": {look: figures(report.total(look)) for look in LOOKS},
        "later": {look: figures(report.total(look, later)) for look in LOOKS} if later else None,
        "epochs": [
            {
                "epoch": epoch.epoch,
                "num_rollouts": epoch.num_rollouts,
                "drafted": {look: figures(drafted) for look, drafted in epoch.drafted.items()},
                "run": None if epoch.run is None else asdict(epoch.run),
            }
            for epoch in report.epochs
        ],
    }
    return json.dumps(record, indent=2, allow_nan=False)


def show(report: DraftsReport, console: Console) -> None:
    """Prints the tables, and the assumption of the speedup under them."""
    for line in _head(report):
        console.print(line, soft_wrap=True, highlight=False)
    console.print(_source_table(report))
    if report.order == "epochs" and len(report.epochs) > 1:
        console.print(_epoch_table(report))
    for line in _foot(report):
        console.print(line, soft_wrap=True, highlight=False)


def _head(report: DraftsReport) -> Iterable[str]:
    earlier = "earlier epochs" if report.order == "epochs" else "the lines before"
    yield (
        f"{report.source}: {report.num_rollouts:,} rollouts of {report.num_prompts:,} prompts replayed; "
        f"{report.num_with_history:,} have history, which is the prompt's rollouts in {earlier}"
    )
    if report.num_rollouts < report.num_recorded:
        yield f"a sample of whole prompts; {report.num_recorded:,} rollouts are recorded (--max-rollouts)"


def _source_table(report: DraftsReport) -> Table:
    columns = ("rollouts", "tokens", "tokens/step", "accepted / drafted", "speedup")
    table = figures_table("Drafting, replayed", ("drafts from", *columns))
    for look in LOOKS:
        table.add_row(NAMES[look], *_cells(report, look, report.epochs))
        if look == "all" and report.epochs[1:]:
            later = "  after first epoch" if report.order == "epochs" else "  after first rollout"
            table.add_row(later, *_cells(report, look, report.epochs[1:]))
    return table


def _cells(report: DraftsReport, look: Look, epochs: Sequence[EpochDrafts]) -> list[str]:
    drafted = report.total(look, epochs)
    share = "" if drafted.acceptance is None else f" {drafted.acceptance:.0%}"
    return [
        f"{sum(epoch.num_rollouts for epoch in epochs):,}",
        f"{drafted.num_tokens:,}",
        f"{drafted.tokens_per_step:.2f}",
        f"{_short(drafted.num_accepted)} / {_short(drafted.num_drafted)}{share}",
        f"{report.speedup(drafted):.2f}x",
    ]


def _epoch_table(report: DraftsReport) -> Table:
    names = ("all", "history", "other prompt", "own", "logged by the run")
    table = figures_table("By epoch: tokens per step / accepted drafts", ("epoch", *names))
    for epoch in report.epochs:
        cells = [_pair(drafted.tokens_per_step, drafted.acceptance) for drafted in epoch.drafted.values()]
        own = "-" if epoch.run is None else _pair(epoch.run.tokens_per_forward, epoch.run.acceptance)
        table.add_row(str(epoch.epoch), *cells, own)
    return table


def _foot(report: DraftsReport) -> Iterable[str]:
    if report.num_with_history == 0:
        yield (
            "There is nothing to draft from: no prompt has an earlier rollout. Give files with several rollouts of a "
            "prompt."
        )
    drafted = report.total("all")
    yield (
        f"The speedup is of decoding. It assumes that verifying a drafted token costs {report.verify_cost:.3g} of a "
        "row's decoding step (--verify-cost), and that drafting costs nothing."
    )
    if drafted.num_drafted:
        most = (drafted.num_tokens - drafted.num_steps) / drafted.num_drafted
        yield f"These drafts pay while that cost is below {most:.2f}."


def _short(count: int) -> str:
    """61,200 as it is, 612,345 as 612k."""
    return f"{count:,}" if count < 100_000 else f"{count / 1e3:,.0f}k"


def _pair(gain: float, acceptance: float | None) -> str:
    return f"{gain:.2f} / {'-' if acceptance is None else f'{acceptance:.0%}'}"
