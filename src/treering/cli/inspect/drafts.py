"""`treering inspect --drafts`: how much faster drafts from earlier rollouts would make decoding, by replay.

Recorded rollouts are replayed through the real history store and drafter (`analysis.replay`). Steps and tokens are
counted; the speedup follows from an assumed cost of verifying a drafted token. No clock is read and no torch is loaded.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from treering.analysis.recording import Recorded, some_prompts
from treering.analysis.replay import Drafted, Look, replay
from treering.cli.inspect.rollouts import RunFigures, drafter_settings, read_figures, read_rollouts
from treering.cli.progress import StageProgress, note_compiling
from treering.data import Renderer
from treering.history.draft.drafter import Drafter
from treering.history.draft.kernel import propose

REPLAY_TOKENS = 1 << 18
"""About how many sampled tokens are replayed without `--max-rollouts`; at worst some 30,000 per second."""
MAX_EPOCHS = 2
"""Epochs that the store keeps, as runs do by default; in file order it keeps all rollouts."""
LOOKS: tuple[Look, ...] = get_args(Look)
NAMES: dict[Look, str] = {
    "all": "all sources",
    "history": "history, own text",
    "other_prompt": "another prompt's",
    "own": "own text",
}
"""Another prompt's history, with the own text, is the control."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochDrafts:
    """One epoch; in file order, the rollouts with this many earlier ones of their prompt."""

    epoch: int
    num_rollouts: int
    drafted: dict[Look, Drafted]
    run: RunFigures | None
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


def run(
    paths: list[Path],
    tokenizer: Path | None,
    template: Literal["plain", "hf"],
    max_rollouts: int | None,
    verify_cost: float | None,
    json_output: bool,
) -> None:
    """Prints the report to stdout, as JSON or as tables and sentences."""
    report = inspect_drafts(paths, tokenizer, template, max_rollouts, verify_cost)
    if json_output:
        print(as_json(report))
    else:
        show(report, Console())


def inspect_drafts(
    paths: Sequence[Path],
    tokenizer: Path | None,
    template: Literal["plain", "hf"] = "plain",
    max_rollouts: int | None = None,
    verify_cost: float | None = None,
) -> DraftsReport:
    """Reads the rollouts of run folders or trajectory files as one recording and replays them.

    Args:
        paths: folders of `treering train`, or files. Without an epoch on every line, file order counts.
        tokenizer: folder of the tokenizer for messages.
        template: how messages become text.
        max_rollouts: about how many to replay, whole prompts; None replays about `REPLAY_TOKENS` tokens.
        verify_cost: in (0, 1], also the drafter's `min_acceptance`; None takes the run's, or the drafter's default.

    Raises:
        InputError: a folder without rollouts, a bad file, or no sampled token.

    Example: two equal rollouts of 41 tokens of one prompt, with drafts of at most 64 tokens, take 41 steps and a few.
    """
    with StageProgress() as progress:
        renderer = Renderer(tokenizer=tokenizer, template=template)
        recorded, order = read_rollouts(paths, renderer, progress, allow_file_order=True)
        if max_rollouts is None:
            replayed = some_prompts(recorded, weights=recorded.lengths, limit=REPLAY_TOKENS)
        else:
            replayed = some_prompts(recorded, weights=np.ones_like(recorded.lengths), limit=max_rollouts)
        max_epochs, settings = drafter_settings(paths[0]) or (MAX_EPOCHS, {})
        if verify_cost is not None:
            settings = settings | {"min_acceptance": verify_cost}
        note_compiling(progress.console, propose)
        progress.begin("drafting", len(LOOKS) * int(replayed.lengths.sum()), "tokens")
        if order == "file":
            max_epochs = int(replayed.epochs.max()) + 1
        drafted = {
            look: replay(replayed, look, max_epochs=max_epochs, settings=settings, on_tokens=progress.advance)
            for look in LOOKS
        }
    figures = read_figures(paths[0]) if len(paths) == 1 else {}
    return DraftsReport(
        source=", ".join(str(path) for path in paths),
        order=order,
        num_rollouts=replayed.num_rollouts,
        num_recorded=recorded.num_rollouts,
        num_prompts=np.unique(replayed.prompts).size,
        num_with_history=_num_with_history(replayed),
        verify_cost=settings.get("min_acceptance", signature(Drafter).parameters["min_acceptance"].default),
        epochs=tuple(
            EpochDrafts(
                epoch=epoch,
                num_rollouts=int((replayed.epochs == epoch).sum()),
                drafted={look: found[epoch] for look, found in drafted.items()},
                run=figures.get(epoch),
            )
            for epoch in drafted["all"]
        ),
    )


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
    table = _table("Drafting, replayed", "drafts from", *columns)
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
    table = _table("By epoch: tokens per step / accepted drafts", "epoch", *names)
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


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column(columns[0], no_wrap=True)
    for name in columns[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _short(count: int) -> str:
    """61,200 as it is, 612,345 as 612k."""
    return f"{count:,}" if count < 100_000 else f"{count / 1e3:,.0f}k"


def _pair(gain: float, acceptance: float | None) -> str:
    return f"{gain:.2f} / {'-' if acceptance is None else f'{acceptance:.0%}'}"


def _num_with_history(recorded: Recorded) -> int:
    first = np.full(len(recorded.prompt_ids), np.iinfo(np.int64).max)
    np.minimum.at(first, recorded.prompts, recorded.epochs)
    return int((recorded.epochs > first[recorded.prompts]).sum())
