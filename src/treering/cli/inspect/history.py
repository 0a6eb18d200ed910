"""`treering inspect --history`: whether earlier epochs foretell rollouts, measured on those of a run.

Knows where a run keeps what, which measures are taken on which rollouts, and their JSON. What is measured is known to
`history.reuse`, `schedule.calibration` and `history.replay`. Loads no torch.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from rich.console import Console

from treering.analysis.recording import Recorded, lengths_before, other_prompts, record, some_prompts
from treering.analysis.replay import Drafted, Look, replay
from treering.analysis.reuse import Reuse, ReuseMeter, Source
from treering.cli.inspect.run_folder import RunFigures, drafter_settings, read_figures, trajectory_files
from treering.cli.progress import StageProgress
from treering.data import RenderedTrajectory, Renderer, Trajectory, read_trajectories
from treering.schedule.predict.calibration import Calibration, RankGroups, calibrate, group_ranks

REPLAY_TOKENS = 1 << 18
"""Sampled tokens of whole prompts that drafters are replayed on, about; some 30,000 a second where drafts fail."""
SOURCES: tuple[Source, ...] = get_args(Source)
LOOKS: tuple[Look, ...] = get_args(Look)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankReport:
    """Lengths against the median that the prompt had in the epoch before."""

    groups: RankGroups
    calibration: Calibration
    other_prompt: RankGroups | None
    """The control: predicted by another prompt's median; None where there is no other one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochReport:
    """One epoch, against the one before."""

    epoch: int
    before: int | None
    """None for the first one."""
    num_rollouts: int
    """Measured for reuse and ranks: those whose prompt ran in the epoch before; all of the first epoch's."""
    num_left_out: int
    """The others."""
    reuse: dict[Source, Reuse | None]
    """None where there is no such source."""
    ranks: RankReport | None
    drafted: dict[Look, Drafted | None]
    """None where none of the epoch's rollouts was replayed."""
    run: RunFigures | None
    """What the run itself logged of this epoch; None where it did not."""

    @property
    def excess(self) -> float | None:
        """Reuse from history beyond the better control; None where there is no history or no control."""
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
    """Rollouts before a sample was taken."""
    num_prompts: int
    num_tokens: int
    """Sampled ones."""
    num_replayed: int
    """Rollouts that drafters were replayed on."""
    epochs: tuple[EpochReport, ...]


def inspect_history(
    paths: Sequence[Path],
    tokenizer: Path | None,
    template: Literal["plain", "hf"] = "plain",
    num_groups: int = 8,
    max_rollouts: int | None = None,
) -> HistoryReport:
    """Reads and measures the rollouts of a run folder, or of trajectory files, as one recording.

    Args:
        paths: folders of `treering train`, or files.
        tokenizer: folder that messages are rendered with.
        template: how they are.
        num_groups: rank groups of lengths.
        max_rollouts: about so many, of whole prompts, the same ones in every epoch; None takes all.

    Raises:
        InputError: a folder without rollouts, a bad file, or rollouts without an epoch.

    Example: two epochs in which each prompt is answered alike, every answer 103 tokens long and its own, have a reuse
    of 100 / 103 from history.
    """
    with StageProgress() as progress:
        recorded = _read(paths, Renderer(tokenizer=tokenizer, template=template), progress)
        chosen = recorded
        if max_rollouts is not None:
            chosen = some_prompts(recorded, weights=np.ones_like(recorded.lengths), limit=max_rollouts)
        reuse = _measure_reuse(chosen, progress)
        replayed = some_prompts(chosen, weights=chosen.lengths, limit=REPLAY_TOKENS)
        drafted = _replay(replayed, paths, progress)
    figures = read_figures(paths[0]) if len(paths) == 1 else {}
    epochs = list(reuse)
    return HistoryReport(
        source=", ".join(str(path) for path in paths),
        num_rollouts=chosen.num_rollouts,
        num_recorded=recorded.num_rollouts,
        num_prompts=np.unique(chosen.prompts).size,
        num_tokens=int(chosen.lengths.sum()),
        num_replayed=replayed.num_rollouts,
        epochs=tuple(
            _epoch(chosen, epoch, before, num_groups, reuse[epoch], drafted, figures.get(epoch))
            for before, epoch in zip([None, *epochs[:-1]], epochs, strict=True)
        ),
    )


def rank_lengths(recorded: Recorded, epoch: int, before: int, num_groups: int) -> RankReport | None:
    """How the lengths of an epoch rank against what the epoch before says of them; None where no prompt ran in both.

    Example: prompts that keep their lengths are all accurate, and a shift of all lengths alike is no error of ranks.
    """
    medians, longest = lengths_before(recorded, before)
    rollouts = np.flatnonzero(recorded.epochs == epoch)
    rollouts = rollouts[~np.isnan(medians[recorded.prompts[rollouts]])]
    if rollouts.size == 0:
        return None
    prompts, lengths = recorded.prompts[rollouts], recorded.lengths[rollouts]
    others = other_prompts(~np.isnan(medians))[prompts]
    control = None
    if (others >= 0).all():
        control = group_ranks(medians[others], lengths, num_groups=num_groups, longest_before=longest[others])
    return RankReport(
        groups=group_ranks(medians[prompts], lengths, num_groups=num_groups, longest_before=longest[prompts]),
        calibration=calibrate(medians[prompts], lengths),
        other_prompt=control,
    )


def as_json(report: HistoryReport) -> str:
    """The report as one JSON object; shares by `HIT_LENGTHS` and matrices are lists."""
    epochs = [_epoch_json(epoch) for epoch in report.epochs]
    names = ("source", "num_rollouts", "num_recorded", "num_prompts", "num_tokens", "num_replayed")
    return json.dumps({name: getattr(report, name) for name in names} | {"epochs": epochs}, indent=2, allow_nan=False)


def run(
    paths: list[Path],
    tokenizer: Path | None,
    template: Literal["plain", "hf"],
    num_groups: int,
    max_rollouts: int | None,
    json_output: bool,
) -> None:
    """Prints the report to stdout, as JSON or as tables and sentences."""
    from treering.cli.inspect.history_tables import show

    report = inspect_history(paths, tokenizer, template, num_groups, max_rollouts)
    if json_output:
        print(as_json(report))
    else:
        show(report, Console())


def _read(paths: Sequence[Path], renderer: Renderer, progress: StageProgress) -> Recorded:
    files = trajectory_files(paths)
    progress.begin("reading", len(files), "files")
    trajectories: list[Trajectory] = []
    rendered: list[RenderedTrajectory] = []
    for file in files:
        found = read_trajectories(file)
        trajectories += found
        rendered += renderer.render(found)
        progress.advance(1)
    return record(trajectories, rendered)


def _measure_reuse(recorded: Recorded, progress: StageProgress) -> dict[int, dict[Source, Reuse | None]]:
    progress.begin("reuse", len(SOURCES) * recorded.num_rollouts, "rollouts")
    meter = ReuseMeter(recorded)
    found: dict[int, dict[Source, Reuse | None]] = {}
    for epoch in meter.epochs():
        rollouts, found[epoch] = meter.rollouts_of(epoch), {}
        for source in SOURCES:
            found[epoch][source] = meter.measure(rollouts, source)
            progress.advance(int((recorded.epochs == epoch).sum()))
    return found


def _replay(recorded: Recorded, paths: Sequence[Path], progress: StageProgress) -> dict[Look, dict[int, Drafted]]:
    progress.begin("drafting", len(LOOKS) * int(recorded.lengths.sum()), "tokens")
    max_epochs, settings = drafter_settings(paths[0])
    return {
        look: replay(recorded, look, max_epochs=max_epochs, settings=settings, on_tokens=progress.advance)
        for look in LOOKS
    }


def _epoch(
    recorded: Recorded,
    epoch: int,
    before: int | None,
    num_groups: int,
    reuse: dict[Source, Reuse | None],
    drafted: dict[Look, dict[int, Drafted]],
    figures: RunFigures | None,
) -> EpochReport:
    num_rollouts = next((one.num_rollouts for one in reuse.values() if one), 0)
    return EpochReport(
        epoch=epoch,
        before=before,
        num_rollouts=num_rollouts,
        num_left_out=int((recorded.epochs == epoch).sum()) - num_rollouts,
        reuse=reuse,
        ranks=None if before is None else rank_lengths(recorded, epoch, before, num_groups),
        drafted={look: found.get(epoch) for look, found in drafted.items()},
        run=figures,
    )


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
        "drafted": {look: _drafted_json(drafted) for look, drafted in report.drafted.items()},
        "run": _plain(report.run),
    }


def _reuse_json(reuse: Reuse | None) -> dict[str, Any] | None:
    return None if reuse is None else asdict(reuse) | {"rate": reuse.rate}


def _drafted_json(drafted: Drafted | None) -> dict[str, Any] | None:
    if drafted is None:
        return None
    return asdict(drafted) | {"tokens_per_step": drafted.tokens_per_step, "acceptance": drafted.acceptance}


def _plain(record: Any) -> dict[str, Any] | None:
    if record is None:
        return None
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in asdict(record).items()}
