"""The records of `treering inspect --history`, and their JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np

from treering.analysis.reuse import Reuse, Source
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
        "reuse": {source: _reuse_json(reuse) for source, reuse in report.reuse.items()},
        "excess": report.excess,
        "ranks": None if ranks is None else {name: _plain(getattr(ranks, name)) for name in ranks.__slots__},
    }


def _reuse_json(reuse: Reuse | None) -> dict[str, Any] | None:
    return None if reuse is None else asdict(reuse) | {"rate": reuse.rate}


def _plain(record: Any) -> dict[str, Any] | None:
    if record is None:
        return None
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in asdict(record).items()}
