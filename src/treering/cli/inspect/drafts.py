"""`treering inspect --drafts`: replays recorded rollouts through the real history store and drafter.

It says how much faster drafts from earlier rollouts would make decoding. No clock is read and no torch is loaded.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from treering.analysis.recording import Recorded, some_prompts
from treering.analysis.replay import replay
from treering.cli.display.progress import StageProgress, note_compiling
from treering.cli.inspect.drafts_report import LOOKS, DraftsReport, EpochDrafts, as_json, show
from treering.cli.inspect.rollouts import drafter_settings, read_figures, read_rollouts
from treering.data import FormatName, Renderer, Template
from treering.history.draft.kernel import propose
from treering.history.draft.settings import MIN_ACCEPTANCE

REPLAY_TOKENS = 1 << 18
"""About how many sampled tokens are replayed without `--max-rollouts`; at worst some 30,000 per second."""
MAX_EPOCHS = 2
"""Epochs that the store keeps, as runs do by default; in file order it keeps all rollouts."""


def run(
    paths: list[Path],
    tokenizer: Path | None,
    template: Template,
    max_rollouts: int | None,
    verify_cost: float | None,
    json_output: bool,
    format: FormatName = "auto",
    keeps_cache: bool = True,
) -> None:
    """Prints the report to stdout, as JSON or as tables and sentences."""
    report = inspect_drafts(paths, tokenizer, template, max_rollouts, verify_cost, format, keeps_cache)
    if json_output:
        print(as_json(report))
    else:
        show(report, Console())


def inspect_drafts(
    paths: Sequence[Path],
    tokenizer: Path | None,
    template: Template = "auto",
    max_rollouts: int | None = None,
    verify_cost: float | None = None,
    format: FormatName = "auto",
    keeps_cache: bool = True,
) -> DraftsReport:
    """Reads the rollouts of run folders or trajectory files as one recording and replays them.

    Args:
        paths: folders of `treering train`, or files. Without an epoch on every line, file order counts.
        tokenizer: folder of the tokenizer for messages.
        template: how messages become text.
        max_rollouts: about how many to replay, whole prompts; None replays about `REPLAY_TOKENS` tokens.
        verify_cost: in (0, 1], also the drafter's `min_acceptance`; None takes the run's, or the drafter's default.
        format: of the records.
        keeps_cache: whether tokens of files are kept for the next start.

    Raises:
        InputError: a folder without rollouts, a bad file, or no sampled token.

    Example: two equal rollouts of 41 tokens of one prompt, with drafts of at most 64 tokens, take 41 steps and a few.
    """
    with StageProgress() as progress:
        renderer = Renderer(tokenizer=tokenizer, template=template)
        rollouts = read_rollouts(
            paths, renderer, progress, allow_file_order=True, format=format, keeps_cache=keeps_cache
        )
        recorded, order = rollouts.outline, rollouts.order
        if max_rollouts is None:
            chosen = some_prompts(recorded, weights=recorded.lengths, limit=REPLAY_TOKENS)
        else:
            chosen = some_prompts(recorded, weights=np.ones_like(recorded.lengths), limit=max_rollouts)
        replayed = rollouts.record(chosen)
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
        verify_cost=settings.get("min_acceptance", MIN_ACCEPTANCE),
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


def _num_with_history(recorded: Recorded) -> int:
    first = np.full(len(recorded.prompt_ids), np.iinfo(np.int64).max)
    np.minimum.at(first, recorded.prompts, recorded.epochs)
    return int((recorded.epochs > first[recorded.prompts]).sum())
