"""Reads recorded rollouts from trajectory files or the run folder of `treering train`, with its drafter settings.

The names of files and keys repeat those of modules that load torch, which this one does not; a test compares them.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from treering import metrics
from treering.analysis.recording import Outline, Recorded, Sampled, outline
from treering.cli.data_files import expanded, read_file
from treering.cli.display.progress import StageProgress
from treering.data import FormatName, RenderedTrajectory, Renderer
from treering.data.cache.build import ReadOptions
from treering.data.cache.dataset import TokenDataset
from treering.data.formats.containers import record_files
from treering.data.formats.files import whole_lines
from treering.data.formats.tables import is_dataset_folder
from treering.errors import InputError

ROLLOUTS_FOLDER = "rollouts"
CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"

_SETTINGS = ("max_draft", "min_acceptance", "policy", "shape", "sources")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """What a run logged about the drafts of an epoch, summed over its steps.

    Example: steps with 300 tokens in 100 row-steps and 100 tokens in 100 have 2.0 tokens per forward together.
    """

    tokens_per_forward: float
    acceptance: float | None
    """None if nothing was drafted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollouts:
    """The rollouts of files as an outline, whose tokens are read where they are needed."""

    outline: Outline
    order: Literal["epochs", "file"]
    """What orders them."""
    datasets: tuple[TokenDataset, ...]

    def record(self, chosen: Outline) -> Recorded:
        """The recording of a part of the outline."""
        bounds = np.cumsum([0, *(dataset.num_rows for dataset in self.datasets)])

        def tokens_of(row: int) -> RenderedTrajectory:
            place = int(np.searchsorted(bounds, row, side="right")) - 1
            return self.datasets[place].row(row - int(bounds[place]))

        return chosen.record(tokens_of)


def read_rollouts(
    paths: Sequence[Path],
    renderer: Renderer,
    progress: StageProgress,
    *,
    allow_file_order: bool = False,
    format: FormatName = "auto",
    keeps_cache: bool = True,
) -> Rollouts:
    """The rollouts of all paths as one outline.

    With `allow_file_order`, the n-th rollout of a prompt counts as epoch n if any rollout has no epoch.

    Raises:
        InputError: a folder without rollouts, a bad file, no sampled token, or rollouts without an epoch. A torn last
            line of a folder's file is left out with a warning.
    """
    files = [(file, file != path) for path in expanded(paths) for file in _files_of(path)]
    progress.begin("reading", len(files), "files")
    datasets: list[TokenDataset] = []
    for file, is_own in files:
        options = ReadOptions(format=format, may_be_torn=is_own)
        # A run's own files grow, and a cache for each of their states would be no help.
        datasets.append(read_file(file, renderer, options, keeps_cache=keeps_cache and not is_own))
        progress.advance(1)
    if form := next((dataset.facts.form for dataset in datasets if dataset.facts.form), None):
        progress.console.print(form, soft_wrap=True, markup=False)
    rows = [row for dataset in datasets for row in _sampled(dataset)]
    in_file_order = allow_file_order and any(row.epoch is None for row in rows)
    return Rollouts(
        outline=outline(rows, in_file_order=in_file_order),
        order="file" if in_file_order else "epochs",
        datasets=tuple(datasets),
    )


def _sampled(dataset: TokenDataset) -> Iterator[Sampled]:
    for task, epoch, step, num_sampled, reward in dataset.rows[
        ["task", "epoch", "step", "num_sampled", "reward"]
    ].tolist():
        yield Sampled(
            task_id=dataset.task_ids[task],
            epoch=None if epoch < 0 else epoch,
            step=None if step < 0 else step,
            num_sampled=num_sampled,
            reward=None if np.isnan(reward) else reward,
        )


def trajectory_files(paths: Sequence[Path]) -> list[Path]:
    """The files of each path: the path itself, also of a dataset's folder, or those of a run or its rollouts folder.

    Raises:
        InputError: a folder without such files.
    """
    return [file for path in paths for file in _files_of(path)]


def drafter_settings(path: Path) -> tuple[int, dict[str, Any]] | None:
    """Epochs that the store of a run keeps, and the settings of its drafter; None if `path` is not a run's folder.

    Raises:
        InputError: the run's configuration cannot be read.
    """
    file = path / CONFIG_FILE
    if not file.is_file():
        return None
    try:
        history = json.loads(file.read_text(encoding="utf-8"))["history"]
        settings = {name: history[name] for name in _SETTINGS} | {"sources": tuple(history["sources"])}
        # A run without drafts may have no source; the replay says what drafts would have done.
        return history["max_epochs"], settings if settings["sources"] else settings | {"sources": ("history", "own")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{file}: a run's configuration says in [history] what is drafted, and it cannot be read ({error!r}); "
            "inspect the files of its rollouts folder instead"
        ) from error


def read_figures(path: Path) -> dict[int, RunFigures]:
    """What a run logged about its own drafts, by epoch; empty if `path` is not a run's folder.

    A torn last line is left out with a warning.

    Raises:
        InputError: a damaged line.
    """
    file = path / METRICS_FILE
    if not file.is_file():
        return {}
    totals: dict[int, list[float]] = {}
    for epoch, counts in _counts(file):
        have = totals.setdefault(epoch, [0.0] * 4)
        totals[epoch] = [a + b for a, b in zip(have, counts, strict=True)]
    return {
        epoch: RunFigures(
            tokens_per_forward=tokens / num_steps if num_steps else 0.0,
            acceptance=accepted / drafted if drafted else None,
        )
        for epoch, (tokens, num_steps, drafted, accepted) in totals.items()
    }


def _counts(file: Path) -> Iterator[tuple[int, tuple[float, float, float, float]]]:
    """The epoch of each step, with its tokens, row-steps, drafted and accepted tokens."""
    for number, line in whole_lines(file):
        try:
            row = json.loads(line)
            tokens, gain = row[metrics.NUM_SAMPLED], row[metrics.TOKENS_PER_FORWARD]
            drafted = row[metrics.NUM_DRAFTED]
            counts = tokens, tokens / gain if gain else 0.0, drafted, drafted * row[metrics.ACCEPTANCE]
            epoch = row[metrics.EPOCH]
            if not 0 <= epoch < 2**63 or int(epoch) != epoch:
                raise ValueError(f"{metrics.EPOCH} is {epoch!r}")
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise InputError(
                f"{file}:{number}: a line of a run's metrics has {metrics.TOKENS_PER_FORWARD} and others, and this one "
                f"cannot be read ({error!r}); inspect the files of the rollouts folder instead"
            ) from error
        yield int(epoch), counts


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    # A run's folder may hold tables that were written from it.
    for folder in (path / ROLLOUTS_FOLDER, path):
        if files := sorted(folder.glob("epoch-*.jsonl")):
            return files
    if is_dataset_folder(path) or (record_files(path) and not (path / METRICS_FILE).exists()):
        return [path]
    raise InputError(
        f"a run keeps its rollouts in {ROLLOUTS_FOLDER}/epoch-*.jsonl, and {path} has none; run it with run.rollouts = "
        '"on", or name trajectory files'
    )
