"""`treering inspect --history`: how much of an epoch's rollouts the epoch before predicts, tokens and lengths.

Reads rollouts and takes the measures; `analysis.reuse` and `schedule.predict.calibration` compute them. Loads no torch.
"""

import numpy as np
from rich.console import Console

from treering.analysis.recording import Recorded, lengths_before, other_prompts, some_prompts
from treering.analysis.reuse import Reuse, ReuseMeter, Source, copy_all
from treering.cli.display.progress import WorkProgress, note_compiling
from treering.cli.inspect.history_report import SOURCES, EpochReport, HistoryReport, RankReport, as_json, show
from treering.cli.inspect.options import InspectOptions
from treering.cli.inspect.rollouts import read_rollouts
from treering.schedule.predict.calibration import calibrate, group_ranks

_NUM_GROUPS = 8
"""Rank groups of lengths, unless another number is asked for."""


def run(options: InspectOptions) -> None:
    """Prints the report to stdout, as JSON or as tables and sentences."""
    report = inspect_history(options)
    if options.json_output:
        print(as_json(report))
    else:
        show(report, Console())


def inspect_history(options: InspectOptions) -> HistoryReport:
    """Reads and measures the rollouts of run folders or trajectory files as one recording.

    Raises:
        InputError: a folder without rollouts, a bad file, or rollouts without an epoch.

    Example: two epochs in which each prompt gets the same answer, each of 103 tokens unlike any other prompt's, have a
    reuse of 100 / 103 from history.
    """
    with WorkProgress(Console(stderr=True)) as progress:
        rollouts = read_rollouts(options, progress)
        part = recorded = rollouts.outline
        if options.max_rollouts is not None:
            part = some_prompts(recorded, weights=np.ones_like(recorded.lengths), limit=options.max_rollouts)
        chosen = rollouts.record(part)
        note_compiling(progress.console, copy_all)
        reuse = _measure_reuse(chosen, progress)
    epochs = list(reuse)
    return HistoryReport(
        source=", ".join(str(path) for path in options.files),
        num_rollouts=chosen.num_rollouts,
        num_recorded=recorded.num_rollouts,
        num_prompts=np.unique(chosen.prompts).size,
        num_tokens=int(chosen.lengths.sum()),
        epochs=tuple(
            _epoch(chosen, epoch, before, options.groups or _NUM_GROUPS, reuse[epoch])
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


def _measure_reuse(recorded: Recorded, progress: WorkProgress) -> dict[int, dict[Source, Reuse | None]]:
    count = progress.counting("reuse", len(SOURCES) * recorded.num_rollouts)
    meter = ReuseMeter(recorded)
    found: dict[int, dict[Source, Reuse | None]] = {}
    for epoch in meter.epochs():
        rollouts, found[epoch] = meter.rollouts_of(epoch), {}
        for source in SOURCES:
            found[epoch][source] = meter.measure(rollouts, source)
            count(int((recorded.epochs == epoch).sum()))
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
