"""`treering inspect --drafts`: replays recorded rollouts through the real history store and drafter.

It says how much faster drafts from earlier rollouts would make decoding. No clock is read and no torch is loaded.
"""

import numpy as np
from rich.console import Console

from treering.analysis.recording import Outline, Recorded, some_prompts
from treering.analysis.replay import replay
from treering.cli.display.progress import WorkProgress, note_compiling
from treering.cli.inspect.drafts_report import LOOKS, DraftsReport, EpochDrafts, LoggedDrafts, as_json, show
from treering.cli.inspect.options import InspectOptions
from treering.cli.inspect.rollouts import read_rollouts
from treering.history.draft.kernel import propose
from treering.history.draft.settings import MIN_ACCEPTANCE
from treering.report.epochs import by_epoch
from treering.report.origins import drafter_settings, num_history_epochs
from treering.report.run import CONFIG_FILE, RunData, read_run

REPLAY_TOKENS = 1 << 18
"""About how many sampled tokens are replayed without `--max-rollouts`; at worst some 30,000 per second."""


def run(options: InspectOptions) -> None:
    """Prints the report to stdout, as JSON or as tables and sentences."""
    report = inspect_drafts(options)
    if options.json_output:
        print(as_json(report))
    else:
        show(report, Console())


def inspect_drafts(options: InspectOptions) -> DraftsReport:
    """Reads the rollouts of run folders or trajectory files as one recording and replays them.

    Without an epoch on every line, file order counts. The drafter has the settings of a run, else its defaults; a
    `verify_cost` is also its `min_acceptance`.

    Raises:
        InputError: a folder without rollouts, a bad file, or no sampled token.

    Example: two equal rollouts of 41 tokens of one prompt, with drafts of at most 64 tokens, take 41 steps and a few.
    """
    folder = options.files[0]
    run = read_run(folder) if (folder / CONFIG_FILE).is_file() else None
    with WorkProgress(Console(stderr=True)) as progress:
        rollouts = read_rollouts(options, progress, allow_file_order=True)
        recorded, order = rollouts.outline, rollouts.order
        replayed = rollouts.record(_chosen(recorded, options.max_rollouts))
        for note in () if run is None else run.notes:
            progress.console.print(note, soft_wrap=True, markup=False)
        config = {} if run is None else run.config
        settings = {} if run is None else drafter_settings(config)
        if options.verify_cost is not None:
            settings = settings | {"min_acceptance": options.verify_cost}
        note_compiling(progress.console, propose)
        on_tokens = progress.counting("drafting", len(LOOKS) * int(replayed.lengths.sum()))
        max_epochs = int(replayed.epochs.max()) + 1 if order == "file" else num_history_epochs(config)
        drafted = {
            look: replay(replayed, look, max_epochs=max_epochs, settings=settings, on_tokens=on_tokens)
            for look in LOOKS
        }
    logged = _logged(run) if len(options.files) == 1 else {}
    return DraftsReport(
        source=", ".join(str(path) for path in options.files),
        order=order,
        num_rollouts=replayed.num_rollouts,
        num_recorded=recorded.num_rollouts,
        num_prompts=np.unique(replayed.prompts).size,
        num_with_history=_num_with_history(replayed),
        verify_cost=settings.get("min_acceptance", MIN_ACCEPTANCE),
        epochs=tuple(
            EpochDrafts(
                epoch=epoch,
                num_rollouts=int((replayed.epochs == epoch).sum()),
                drafted={look: found[epoch] for look, found in drafted.items()},
                run=logged.get(epoch),
            )
            for epoch in drafted["all"]
        ),
    )


def _chosen(recorded: Outline, max_rollouts: int | None) -> Outline:
    if max_rollouts is None:
        return some_prompts(recorded, weights=recorded.lengths, limit=REPLAY_TOKENS)
    return some_prompts(recorded, weights=np.ones_like(recorded.lengths), limit=max_rollouts)


def _logged(run: RunData | None) -> dict[int, LoggedDrafts]:
    """What a run has logged of its own drafts, by epoch."""
    rows = [] if run is None else by_epoch(run.rows)
    return {
        int(row["epoch"]): LoggedDrafts(tokens_per_forward=row["tokens_per_forward"], acceptance=row["acceptance"])
        for row in rows
        if row["epoch"] is not None and row["tokens_per_forward"] is not None
    }


def _num_with_history(recorded: Recorded) -> int:
    first = np.full(len(recorded.prompt_ids), np.iinfo(np.int64).max)
    np.minimum.at(first, recorded.prompts, recorded.epochs)
    return int((recorded.epochs > first[recorded.prompts]).sum())
