"""The times of passes in the workers of a run, where they share the machine with the run's other processes."""

import os
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from treering.cli.train import TrainRecipe
from treering.engine.protocol import Engine, EngineStats, Rollout, WhenRunning
from treering.history.draft.drafter import Drafter

PASS, LOAD = range(2)
"""Kinds of records."""

COLUMNS = ("kind", "started_s", "seconds", "num_rows", "num_prefilled", "num_sampled")
"""File name of a record; `read_passes` adds the number of the worker."""


def record_passes(engine: Engine, file: Path) -> Engine:
    """Lets an engine record the seconds of each pass and each load of weights; it appends them when it is idle.

    A pass lasts until the next one begins, so that the worker's other work counts.

    Example: passes over 3, 3 and 2 rows are three records, the last of which ends with the pass itself.
    """
    step, update_weights = engine.step, engine.update_weights
    records: list[tuple[float, ...]] = []
    running: list[tuple[float, EngineStats]] = []

    def end_pass() -> None:
        while running:
            started, before = running.pop()
            done, seconds = engine.stats.since(before), time.perf_counter() - started
            records.append((PASS, started, seconds, done.num_rows, done.num_prefilled, done.num_sampled))

    def timed_step() -> list[Rollout]:
        end_pass()
        running.append((time.perf_counter(), engine.stats))
        rollouts = step()
        if engine.num_unfinished == 0:
            end_pass()
            with file.open("a", encoding="utf-8") as stream:
                stream.writelines(",".join(map(repr, record)) + "\n" for record in records)
            records.clear()
        return rollouts

    def timed_update(version: int, when_running: WhenRunning = "finish") -> None:
        started = time.perf_counter()
        update_weights(version, when_running)
        records.append((LOAD, started, time.perf_counter() - started, 0, 0, 0))

    engine.step, engine.update_weights = timed_step, timed_update  # type: ignore[method-assign]
    return engine


class TimedRecipe(TrainRecipe):
    """The recipe of a run whose workers record the times of passes in its folder."""

    def make_engine(self, model: PreTrainedModel, drafter: Drafter | None, version: int) -> Engine:
        """Make the engine of a worker."""
        folder = self._config.run.dir
        folder.mkdir(parents=True, exist_ok=True)
        return record_passes(super().make_engine(model, drafter, version), folder / f"passes-{os.getpid()}.csv")


def read_passes(folder: Path, *, since_s: float = 0.0) -> NDArray[np.float64]:
    """Records of all workers that began at `since_s` of the clock or later: float64 [N, columns + 1], see `COLUMNS`."""
    found = [np.zeros((0, len(COLUMNS) + 1))]
    for worker, file in enumerate(sorted(folder.glob("passes-*.csv"))):
        own = np.loadtxt(file, delimiter=",", ndmin=2)
        found.append(np.column_stack([own, np.full(len(own), worker)]))
    records = np.concatenate(found)
    # One clock for all processes of a machine.
    return records[records[:, COLUMNS.index("started_s")] >= since_s]
