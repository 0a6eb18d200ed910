"""Reads recorded rollouts from trajectory files or the run folder of `treering train`. Loads no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from treering.analysis.recording import Outline, Recorded, Sampled, outline
from treering.cli.data_files import expanded, read_file
from treering.cli.display.progress import WorkProgress
from treering.cli.inspect.options import InspectOptions
from treering.data import RenderedTrajectory
from treering.data.cache.build import ReadOptions
from treering.data.cache.dataset import TokenDataset
from treering.data.formats.containers import record_files
from treering.data.formats.tables import is_dataset_folder
from treering.errors import InputError
from treering.report.rollouts import ROLLOUTS_FOLDER
from treering.report.run import METRICS_FILE


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


def read_rollouts(options: InspectOptions, progress: WorkProgress, *, allow_file_order: bool = False) -> Rollouts:
    """The rollouts of all files as one outline.

    With `allow_file_order`, the n-th rollout of a prompt counts as epoch n if any rollout has no epoch.

    Raises:
        InputError: a folder without rollouts, a bad file, no sampled token, or rollouts without an epoch. A torn last
            line of a folder's file is left out with a warning.
    """
    files = [(file, file != path) for path in expanded(options.files) for file in rollout_files(path)]
    renderer, count = options.renderer(), progress.counting("reading files", len(files))
    datasets: list[TokenDataset] = []
    for file, is_own in files:
        read = ReadOptions(format=options.format, may_be_torn=is_own)
        # A run's own files grow, and a cache for each of their states would be no help.
        datasets.append(read_file(file, renderer, read, keeps_cache=not options.no_cache and not is_own))
        count(1)
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


def rollout_files(path: Path) -> list[Path]:
    """The files of a path: the path itself, also of a dataset's folder, or those of a run or its rollouts folder.

    Raises:
        InputError: a folder without such files.
    """
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
