"""`treering inspect --history`: how much of an epoch's rollouts the epoch before predicts, tokens and lengths.

Reads rollouts and takes the measures; `analysis.reuse` and `schedule.predict.calibration` compute them. Loads no torch.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from treering.analysis.recording import Recorded, lengths_before, other_prompts, some_prompts
from treering.analysis.reuse import Reuse, ReuseMeter, Source, copy_all
from treering.cli.display.progress import StageProgress, note_compiling
from treering.cli.inspect.history_report import SOURCES, EpochReport, HistoryReport, RankReport, as_json, show
from treering.cli.inspect.rollouts import read_rollouts
from treering.data import FormatName, Renderer, Template
from treering.schedule.predict.calibration import calibrate, group_ranks


def run(
    paths: list[Path],
    tokenizer: Path | None,
    template: Template,
    num_groups: int,
    max_rollouts: int | None,
    json_output: bool,
    format: FormatName = "auto",
    keeps_cache: bool = True,
) -> None:
    """Prints the report to stdout, as JSON or as tables and sentences."""
    report = inspect_history(paths, tokenizer, template, num_groups, max_rollouts, format, keeps_cache)
    if json_output:
        print(as_json(report))
    else:
        show(report, Console())


def inspect_history(
    paths: Sequence[Path],
    tokenizer: Path | None,
    template: Template = "auto",
    num_groups: int = 8,
    max_rollouts: int | None = None,
    format: FormatName = "auto",
    keeps_cache: bool = True,
) -> HistoryReport:
    """Reads and measures the rollouts of run folders or trajectory files as one recording.

    Args:
        paths: folders of `treering train`, or files.
        tokenizer: folder of the tokenizer for messages.
        template: how messages become text.
        num_groups: rank groups of lengths.
        max_rollouts: about how many to measure, whole prompts in all epochs; None measures all.
        format: of the records.
        keeps_cache: whether tokens of files are kept for the next start.

    Raises:
        InputError: a folder without rollouts, a bad file, or rollouts without an epoch.

    Example: two epochs in which each prompt gets the same answer, each of 103 tokens unlike any other prompt's, have a
    reuse of 100 / 103 from history.
    """
    with StageProgress() as progress:
        renderer = Renderer(tokenizer=tokenizer, template=template)
        rollouts = read_rollouts(paths, renderer, progress, format=format, keeps_cache=keeps_cache)
        part = recorded = rollouts.outline
        if max_rollouts is not None:
            part = some_prompts(recorded, weights=np.ones_like(recorded.lengths), limit=max_rollouts)
        chosen = rollouts.record(part)
        note_compiling(progress.console, copy_all)
        reuse = _measure_reuse(chosen, progress)
    epochs = list(reuse)
    return HistoryReport(
        source=", ".join(str(path) for path in paths),
        num_rollouts=chosen.num_rollouts,
        num_recorded=recorded.num_rollouts,
        num_prompts=np.unique(chosen.prompts).size,
        num_tokens=int(chosen.lengths.sum()),
        epochs=tuple(
            _epoch(chosen, epoch, before, num_groups, reuse[epoch])
            for before, epoch in zip([None, *epochs[:-1]], epochs, strict=True)
        ),
    )


def rank_lengths(recorded: Recorded, epoch: int, before: int, num_groups: int) -> RankReport | None:
    """How well the epoch before predicts the ranks of an epoch's lengths; None if no prompt ran in both.

    Example: prompts that keep their lengths are all accurate; a shift of all lengths by one factor changes no rank.
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


def _epoch(
    recorded: Recorded, epoch: int, before: int | None, num_groups: int, reuse: dict[Source, Reuse | None]
) -> EpochReport:
    num_rollouts = next((one.num_rollouts for one in reuse.values() if one), 0)
    return EpochReport(
        epoch=epoch,
        before=before,
        num_rollouts=num_rollouts,
        num_left_out=int((recorded.epochs == epoch).sum()) - num_rollouts,
        reuse=reuse,
        ranks=None if before is None else rank_lengths(recorded, epoch, before, num_groups),
    )
