"""The report of `treering inspect --history`: its records, their JSON, and for people tables with what they show."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from treering.analysis.reuse import HIT_LENGTHS, Reuse, Source
from treering.cli.display.tables import figures_table
from treering.schedule.predict.calibration import Calibration, RankGroups

SOURCES: tuple[Source, ...] = get_args(Source)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankReport:
    """Lengths against the median length that the prompt had in the epoch before."""

    groups: RankGroups
    calibration: Calibration
    other_prompt: RankGroups | None
    """The control: predicted by another prompt's median; None without another prompt."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochReport:
    """One epoch, compared with the one before."""

    epoch: int
    before: int | None
    """None for the first epoch."""
    num_rollouts: int
    """Measured rollouts: those whose prompt ran in the epoch before; all of them in the first epoch."""
    num_left_out: int
    """The others."""
    reuse: dict[Source, Reuse | None]
    """None if there is no such source."""
    ranks: RankReport | None

    @property
    def excess(self) -> float | None:
        """Reuse from history minus that of the better control; None without history or a control."""
        rates = {source: reuse.rate for source, reuse in self.reuse.items() if reuse}
        if not {"history", "other_prompt", "own"} <= rates.keys():
            return None
        return rates["history"] - max(rates["other_prompt"], rates["own"])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HistoryReport:
    """A recording of several epochs."""

    source: str
    num_rollouts: int
    num_recorded: int
    """Rollouts before sampling."""
    num_prompts: int
    num_tokens: int
    """Sampled tokens."""
    epochs: tuple[EpochReport, ...]


def as_json(report: HistoryReport) -> str:
    """The report as one JSON object; shares by `HIT_LENGTHS` and matrices are lists."""
    names = ("source", "num_rollouts", "num_recorded", "num_prompts", "num_tokens")
    epochs = [_epoch_json(epoch) for epoch in report.epochs]
    return json.dumps({name: getattr(report, name) for name in names} | {"epochs": epochs}, indent=2, allow_nan=False)


def _epoch_json(report: EpochReport) -> dict[str, Any]:
    ranks = report.ranks
    return {
        "epoch": report.epoch,
        "before": report.before,
        "num_rollouts": report.num_rollouts,
        "num_left_out": report.num_left_out,
        "reuse": {
            source: None if reuse is None else asdict(reuse) | {"rate": reuse.rate}
            for source, reuse in report.reuse.items()
        },
        "excess": report.excess,
        "ranks": None if ranks is None else {name: _plain(getattr(ranks, name)) for name in ranks.__slots__},
    }


def _plain(record: Any) -> dict[str, Any] | None:
    if record is None:
        return None
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in asdict(record).items()}


NAMES = {"history": "history", "other_prompt": "other prompt", "own": "own", "siblings": "siblings"}
_NOTHING = "-"


def show(report: HistoryReport, console: Console) -> None:
    """Prints the tables, and a sentence under each."""
    for line in _head(report):
        console.print(line, soft_wrap=True, highlight=False)
    ranked = [epoch for epoch in report.epochs if epoch.ranks]
    console.print(_reuse_table(report.epochs), _hit_table(report.epochs))
    console.print(_reuse_sentence(report.epochs), soft_wrap=True, highlight=False)
    if ranked:
        console.print(_rank_table(ranked))
        console.print(_rank_sentence(ranked), soft_wrap=True, highlight=False)


def _head(report: HistoryReport) -> Iterable[str]:
    yield (
        f"{report.source}: {report.num_rollouts:,} rollouts of {report.num_prompts:,} prompts in {len(report.epochs)} "
        f"epochs, {report.num_tokens:,} sampled tokens"
    )
    if report.num_rollouts < report.num_recorded:
        yield f"a sample of whole prompts, the same ones in every epoch; {report.num_recorded:,} rollouts are recorded"
    if left_out := sum(epoch.num_left_out for epoch in report.epochs):
        yield f"{left_out:,} rollouts are left out of reuse and ranks: their prompts did not run in the epoch before"


def _reuse_table(epochs: Sequence[EpochReport]) -> Table:
    title = "Reuse: share of tokens that could be copied at best"
    table = figures_table(title, ("epoch", "rollouts", *(NAMES[source] for source in SOURCES), "excess", "at most"))
    for epoch in epochs:
        found = [epoch.reuse[source] for source in SOURCES]
        bound = next((one.num_after_prefix / one.num_tokens for one in found if one), None)
        table.add_row(
            str(epoch.epoch),
            f"{epoch.num_rollouts:,}",
            *(_percent(one.rate if one else None) for one in found),
            _percent(epoch.excess),
            _percent(bound),
        )
    return table


def _hit_table(epochs: Sequence[EpochReport]) -> Table:
    names = [f"{least}-{most}" if most else f"{least}+" for least, most in HIT_LENGTHS]
    table = figures_table("Hits by length: share of hits / of copied tokens", ("source", *names))
    for source in SOURCES:
        found = [reuse for epoch in epochs if (reuse := epoch.reuse[source])]
        if found and sum(one.num_copied for one in found):
            hits, tokens = _shares(found, lambda one: one.num_hits), _shares(found, lambda one: one.hit_tokens)
            table.add_row(NAMES[source], *(f"{a:.0%} / {b:.0%}" for a, b in zip(hits, tokens, strict=True)))
    return table


def _shares(found: Sequence[Reuse], counts: Callable[[Reuse], Sequence[int]]) -> list[float]:
    totals = np.sum([counts(one) for one in found], axis=0)
    shares: list[float] = (totals / totals.sum()).tolist()
    return shares


def _reuse_sentence(epochs: Sequence[EpochReport]) -> str:
    found = [epoch for epoch in epochs if epoch.excess is not None]
    if not found:
        return "No two prompts ran in two successive epochs, so there is nothing to compare."
    means = {source: _mean(one.rate for epoch in found if (one := epoch.reuse[source])) for source in SOURCES}
    excess = _mean(epoch.excess for epoch in found)
    return (
        f"In the mean of epochs {_percent(means['history'])} of tokens could be copied from the prompt's "
        f"last epoch, {_percent(means['other_prompt'])} from another prompt's and {_percent(means['own'])} from the "
        f"rollout itself: {100 * (excess or 0):.1f} points are the history's own."
    )


def _rank_table(epochs: Sequence[EpochReport]) -> Table:
    number = epochs[0].ranks.groups.num_groups if epochs[0].ranks else 0
    title = f"Rank groups of lengths, {number}: predicted by the prompt's last median"
    columns = ("accurate", "not last", "in 1.1x", "migrated", "crossed", "other prompt", "sigma", "Spearman")
    table = figures_table(title, ("epoch", *columns))
    for epoch in epochs:
        assert epoch.ranks, "epochs with ranks"
        groups, other = epoch.ranks.groups, epoch.ranks.other_prompt
        shares = (groups.accurate, groups.not_last, groups.within_reach, groups.migrated, groups.crossed_boundary)
        errors = (epoch.ranks.calibration.sigma, epoch.ranks.calibration.spearman)
        cells = [*(_percent(share) for share in shares), _percent(other.accurate if other else None)]
        table.add_row(str(epoch.epoch), *cells, *(f"{error:.2f}" for error in errors))
    return table


def _rank_sentence(epochs: Sequence[EpochReport]) -> str:
    found = [epoch.ranks for epoch in epochs if epoch.ranks]
    accurate = _mean(ranks.groups.accurate for ranks in found)
    control = _mean(ranks.other_prompt.accurate for ranks in found if ranks.other_prompt)
    return (
        f"{_percent(accurate)} of rollouts were in the group that their prompt's last median says, or in a shorter "
        f"one; by another prompt's median it would be {_percent(control)}."
    )


def _percent(share: float | None) -> str:
    return _NOTHING if share is None else f"{share:.1%}"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
