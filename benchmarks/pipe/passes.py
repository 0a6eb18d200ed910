"""The times of passes in the workers of a run, where they share the machine with the run's other processes."""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from treering.cli.train.loop import TrainRecipe
from treering.config import RlConfig
from treering.engine.protocol import Engine, EngineStats, Keeps, WhenRunning
from treering.engine.request import Request
from treering.engine.rollout import Rollout, RolloutKey
from treering.history.draft.drafter import Drafter

PASS, LOAD = range(2)
"""Kinds of records."""

COLUMNS = ("kind", "started_s", "seconds", "num_rows", "num_prefilled", "num_sampled")
"""Of a record; `read_passes` adds the number of the worker."""


class TimedEngine(Engine):
    """An engine that records the seconds of each pass and each load of weights, and writes them when it is idle.

    A pass lasts until the next one begins, so that the worker's other work counts.

    Example: passes over 3, 3 and 2 rows are three records, the last of which ends with the pass itself.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        """`folder`: exists; the file in it has the name of the process."""
        self._engine = engine
        self._file = folder / f"passes-{os.getpid()}.csv"
        self._records: list[tuple[float, ...]] = []
        self._open: tuple[float, EngineStats] | None = None

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def keeps(self) -> Keeps:
        return self._engine.keeps

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def num_unfinished(self) -> int:
        return self._engine.num_unfinished

    def progress(self) -> dict[RolloutKey, int]:
        return self._engine.progress()

    def submit(self, requests: Iterable[Request]) -> None:
        self._engine.submit(requests)

    def step(self) -> list[Rollout]:
        self._end_pass()
        self._open = (time.perf_counter(), self._engine.stats)
        rollouts = self._engine.step()
        if self._engine.num_unfinished == 0:
            self._end_pass()
            self._write()
        return rollouts

    def peek(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        return self._engine.peek(keys)

    def abort(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        return self._engine.abort(keys)

    def update_weights(self, version: int, when_running: WhenRunning = "finish") -> None:
        started = time.perf_counter()
        self._engine.update_weights(version, when_running)
        self._records.append((LOAD, started, time.perf_counter() - started, 0, 0, 0))

    def _end_pass(self) -> None:
        if self._open is None:
            return
        (started, before), self._open = self._open, None
        done = self._engine.stats.since(before)
        seconds = time.perf_counter() - started
        self._records.append((PASS, started, seconds, done.num_rows, done.num_prefilled, done.num_sampled))

    def _write(self) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(",".join(map(repr, record)) + "\n" for record in self._records)
        self._records.clear()


class TimedRecipe(TrainRecipe):
    """The recipe of a run whose workers record the times of passes."""

    def __init__(self, config: RlConfig, config_dir: Path, folder: Path) -> None:
        """`folder`: for the records; it exists."""
        super().__init__(config, config_dir)
        self._folder = folder

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_folder": self._folder}

    def make_engine(self, model: PreTrainedModel, drafter: Drafter | None, version: int) -> Engine:
        return TimedEngine(super().make_engine(model, drafter, version), self._folder)


def read_passes(folder: Path, *, since_s: float = 0.0) -> NDArray[np.float64]:
    """Records of all workers that began at `since_s` of the clock or later: float64 [N, columns + 1], see `COLUMNS`."""
    found = [np.zeros((0, len(COLUMNS) + 1))]
    for worker, file in enumerate(sorted(folder.glob("passes-*.csv"))):
        own = np.loadtxt(file, delimiter=",", ndmin=2)
        found.append(np.column_stack([own, np.full(len(own), worker)]))
    records = np.concatenate(found)
    # One clock for all processes of a machine.
    return records[records[:, COLUMNS.index("started_s")] >= since_s]
