"""Replay logged rollouts: measure how many tokens drafts from earlier rollouts save."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from treering.analysis.recording import Outline, Recorded, RolloutFacts, outline, some_prompts
from treering.analysis.replay import Drafted, Look, replay
from treering.cli.data_files import expanded, read_file
from treering.cli.display import PlainConsole, WorkProgress, figures_table, note_compiling
from treering.cli.inspect.inspect_options import InspectOptions
from treering.data import RenderedTrajectory
from treering.data.cache.build_dataset import ReadOptions
from treering.data.cache.dataset import TokenDataset
from treering.data.formats.arrow import is_dataset_folder
from treering.data.formats.containers import record_files
from treering.errors import InputError
from treering.history.draft.drafter import MIN_ACCEPTANCE
from treering.history.draft.kernel import propose
from treering.history.store.store import MAX_EPOCHS
from treering.metrics import METRICS_FILE
from treering.report.content import drafter_settings
from treering.report.rollout_views import ROLLOUTS_FOLDER
from treering.report.run_data import CONFIG_FILE, by_epoch, read_run

REPLAY_TOKENS = 1 << 18
"""Sampled tokens replayed without `--max-rollouts`, roughly; at worst some 30,000 per second."""
LOOKS: tuple[Look, ...] = get_args(Look)
NAMES: dict[Look, str] = {
    "all": "all sources",
    "history": "history, own text",
    "other_prompt": "another prompt's",
    "own": "own text",
}
"""Names of the sources; another prompt's history with the own text is the control."""
NOTE = (
    "Rehearsals are not replayed, because a file does not hold the noise that their tokens are drawn with; a run logs "
    "rehearsal/kept."
)
"""The limit of a replay, printed with every report."""


def run(options: InspectOptions) -> None:
    """Print the report to stdout, as JSON or as tables and sentences."""
    report = inspect_drafts(options)
    if options.json_output:
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        show(report, PlainConsole())


def inspect_drafts(options: InspectOptions) -> dict[str, Any]:
    """Read the rollouts of run folders or trajectory files as one recording, and replay them.

    File order counts unless every line has an epoch: the n-th rollout of a prompt is then of epoch n. The drafter has
    the settings of the run, else its defaults; a `verify_cost` also sets its `min_acceptance`.

    Returns:
        `num_recorded` counts rollouts before sampling, `num_with_history` those whose prompt has one in an earlier
        epoch. `drafted` sums over all epochs, `later` over all but the first, and `run` has what the run logged.

    Raises:
        InputError: a folder without rollouts, a bad file, or no sampled token. A torn last line in a run's own file is
            dropped with a warning.

    Example: two equal rollouts of 41 tokens of one prompt, with drafts of at most 64 tokens, take just over 41 steps.
    """
    folder = options.files[0]
    run = read_run(folder) if (folder / CONFIG_FILE).is_file() else None
    with WorkProgress(PlainConsole(stderr=True)) as progress:
        datasets = _read(options, progress)
        rows = [row for dataset in datasets for row in _sampled(dataset)]
        order = "file" if any(row.epoch is None for row in rows) else "epochs"
        recorded = outline(rows, in_file_order=order == "file")
        weights, limit = recorded.lengths, REPLAY_TOKENS
        if options.max_rollouts is not None:
            weights, limit = np.ones_like(recorded.lengths), options.max_rollouts
        replayed = _recording(datasets, some_prompts(recorded, weights=weights, limit=limit))
        for note in () if run is None else run.notes:
            progress.console.print(note)
        settings = {} if run is None else drafter_settings(run.config)
        if options.verify_cost is not None:
            settings = settings | {"min_acceptance": options.verify_cost}
        note_compiling(progress.console, propose)
        on_tokens = progress.counting("drafting", len(LOOKS) * int(replayed.lengths.sum()))
        max_epochs = int(replayed.epochs.max()) + 1 if order == "file" else MAX_EPOCHS
        drafted = {
            look: replay(replayed, look, max_epochs=max_epochs, settings=settings, on_tokens=on_tokens)
            for look in LOOKS
        }
    verify_cost = settings.get("min_acceptance", MIN_ACCEPTANCE)

    def figures(epochs: Sequence[int]) -> dict[str, dict[str, Any]]:
        return {look: _figures([found[epoch] for epoch in epochs], verify_cost) for look, found in drafted.items()}

    rows_logged = by_epoch(run.rows) if run is not None and len(options.files) == 1 else []
    logged = {
        row["epoch"]: {name: row[name] for name in ("tokens_per_forward", "acceptance")}
        for row in rows_logged
        if row["tokens_per_forward"] is not None
    }
    first = np.full(len(replayed.prompt_ids), np.iinfo(np.int64).max)
    np.minimum.at(first, replayed.prompts, replayed.epochs)
    epochs = list(drafted["all"])
    return {
        "source": ", ".join(str(path) for path in options.files),
        "order": order,
        "num_rollouts": replayed.num_rollouts,
        "num_recorded": recorded.num_rollouts,
        "num_prompts": np.unique(replayed.prompts).size,
        "num_with_history": int((replayed.epochs > first[replayed.prompts]).sum()),
        "verify_cost": verify_cost,
        "num_tokens": sum(part.num_tokens for part in drafted["all"].values()),
        "note": NOTE,
        "drafted": figures(epochs),
        "later": figures(epochs[1:]) if epochs[1:] else None,
        "epochs": [
            {
                "epoch": epoch,
                "num_rollouts": int((replayed.epochs == epoch).sum()),
                "drafted": figures([epoch]),
                "run": logged.get(epoch),
            }
            for epoch in epochs
        ],
    }


def _figures(parts: Sequence[Drafted], verify_cost: float) -> dict[str, Any]:
    """Sum counts, and predict the speedup of decoding.

    Example: 100 tokens in 40 steps with 100 drafted ones at a cost of 0.1 take the time of 50 steps: 2.0.
    """
    total = Drafted(**{name: sum(getattr(part, name) for part in parts) for name in Drafted.__slots__})
    return asdict(total) | {
        "tokens_per_step": total.tokens_per_step,
        "acceptance": total.acceptance,
        "speedup": total.num_tokens / (total.num_steps + verify_cost * total.num_drafted),
    }


def _read(options: InspectOptions, progress: WorkProgress) -> list[TokenDataset]:
    files = [(file, file != path) for path in expanded(options.files) for file in rollout_files(path)]
    renderer, count = options.renderer(), progress.counting("reading files", len(files))
    datasets: list[TokenDataset] = []
    for file, is_own in files:
        read = ReadOptions(format=options.format, may_be_torn=is_own)
        # A run's own files grow, so caching each of their states would not help.
        datasets.append(read_file(file, renderer, read, keeps_cache=not options.no_cache and not is_own))
        count(1)
    if form := next((dataset.facts.form for dataset in datasets if dataset.facts.form), None):
        progress.console.print(form)
    return datasets


def _recording(datasets: Sequence[TokenDataset], chosen: Outline) -> Recorded:
    """Return the recording of a part of the outline of all datasets, whose tokens are read when needed."""
    bounds = np.cumsum([0, *(dataset.num_rows for dataset in datasets)])

    def tokens_of(row: int) -> RenderedTrajectory:
        number = int(np.searchsorted(bounds, row, side="right")) - 1
        return datasets[number].row(row - int(bounds[number]))

    return chosen.record(tokens_of)


def _sampled(dataset: TokenDataset) -> Iterator[RolloutFacts]:
    for task, epoch, step, num_sampled, reward in dataset.rows[
        ["task", "epoch", "step", "num_sampled", "reward"]
    ].tolist():
        yield RolloutFacts(
            task_id=dataset.task_ids[task],
            epoch=None if epoch < 0 else epoch,
            step=None if step < 0 else step,
            num_sampled=num_sampled,
            reward=None if np.isnan(reward) else reward,
        )


def rollout_files(path: Path) -> list[Path]:
    """Return the files of a path: the path itself if it is a file or dataset folder, else the run's rollout files.

    Raises:
        InputError: a folder without such files.
    """
    if not path.is_dir():
        return [path]
    # A run's folder may also hold tables made from its rollouts.
    for folder in (path / ROLLOUTS_FOLDER, path):
        if files := sorted(folder.glob("epoch-*.jsonl")):
            return files
    if is_dataset_folder(path) or (record_files(path) and not (path / METRICS_FILE).exists()):
        return [path]
    raise InputError(
        f"{path} has no {ROLLOUTS_FOLDER}/epoch-*.jsonl, where a run keeps its rollouts; run it with run.rollouts = "
        '"on", or name trajectory files'
    )


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the tables, and the assumption behind the speedup."""
    earlier = "earlier epochs" if report["order"] == "epochs" else "the lines before"
    console.print(
        f"{report['source']}: {report['num_rollouts']:,} rollouts of {report['num_prompts']:,} prompts replayed; "
        f"{report['num_with_history']:,} have history: rollouts of their prompt in {earlier}"
    )
    if report["num_rollouts"] < report["num_recorded"]:
        recorded = f"{report['num_recorded']:,} rollouts are recorded (--max-rollouts)"
        console.print(f"a sample of whole prompts; {recorded}")
    console.print(_source_table(report))
    if report["order"] == "epochs" and report["later"]:
        console.print(_epoch_table(report["epochs"]))
    if report["num_with_history"] == 0:
        console.print(
            "There is nothing to draft from: no prompt has an earlier rollout. Give files with several rollouts of a "
            "prompt."
        )
    console.print(
        f"The speedup is of decoding. It assumes that verifying a drafted token costs {report['verify_cost']:.3g} of a "
        "row's decoding step (--verify-cost), and that drafting is free."
    )
    drafted = report["drafted"]["all"]
    if drafted["num_drafted"]:
        most = (drafted["num_tokens"] - drafted["num_steps"]) / drafted["num_drafted"]
        console.print(f"These drafts pay off while that cost is below {most:.2f}.")
    console.print(NOTE)


def _source_table(report: Mapping[str, Any]) -> Table:
    columns = ("rollouts", "tokens", "tokens/step", "accepted / drafted", "speedup")
    table = figures_table("Drafting, replayed", ("drafts from", *columns))
    first, *later = (epoch["num_rollouts"] for epoch in report["epochs"])
    for look in LOOKS:
        table.add_row(NAMES[look], f"{first + sum(later):,}", *_cells(report["drafted"][look]))
        if look == "all" and later:
            name = "  after first epoch" if report["order"] == "epochs" else "  after first rollout"
            table.add_row(name, f"{sum(later):,}", *_cells(report["later"][look]))
    return table


def _cells(drafted: Mapping[str, Any]) -> list[str]:
    share = "" if drafted["acceptance"] is None else f" {drafted['acceptance']:.0%}"
    return [
        f"{drafted['num_tokens']:,}",
        f"{drafted['tokens_per_step']:.2f}",
        f"{_short(drafted['num_accepted'])} / {_short(drafted['num_drafted'])}{share}",
        f"{drafted['speedup']:.2f}x",
    ]


def _epoch_table(epochs: Sequence[Mapping[str, Any]]) -> Table:
    names = ("all", "history", "other prompt", "own", "logged by the run")
    table = figures_table("By epoch: tokens per step / accepted drafts", ("epoch", *names))
    for epoch in epochs:
        cells = [_pair(drafted["tokens_per_step"], drafted["acceptance"]) for drafted in epoch["drafted"].values()]
        own = "-" if epoch["run"] is None else _pair(epoch["run"]["tokens_per_forward"], epoch["run"]["acceptance"])
        table.add_row(str(epoch["epoch"]), *cells, own)
    return table


def _short(count: int) -> str:
    """Return a count: 61,200 in full, 612,345 as 612k."""
    return f"{count:,}" if count < 100_000 else f"{count / 1e3:,.0f}k"


def _pair(gain: float, acceptance: float | None) -> str:
    return f"{gain:.2f} / {'-' if acceptance is None else f'{acceptance:.0%}'}"
