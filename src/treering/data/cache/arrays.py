"""The arrays of rendered trajectories in a folder: written part by part, and mapped into memory.

R rendered trajectories   F their tokens
"""

import json
import mmap
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from treering.data.rendering.renderer import RenderedTrajectory
from treering.data.trajectory import TaskId, Trajectory

ROWS_FILE, TASKS_FILE = "rows.npy", "tasks.json"

FLAT = MappingProxyType(
    {
        "tokens": np.dtype("<i4"),
        "loss_mask": np.dtype("?"),
        "turn_ends": np.dtype("<i4"),
        "logprobs": np.dtype("<f8"),
        "advantages": np.dtype("<f8"),
    }
)
"""Arrays of all rows one after another, each in a file of its name; rows without log-probs or advantages have no part
in theirs."""

ROW = np.dtype(
    [
        *((name, "<i8") for name in ("num_tokens", "num_turns", "task", "index", "epoch", "step")),
        *((name, "<i8") for name in ("num_sampled", "largest_id")),
        *((name, "<f8") for name in ("reward", "advantage")),
        *((name, "?") for name in ("has_logprobs", "has_advantages")),
    ]
)
"""What is known of a row; -1 and NaN stand for None."""


class ArrayWriter:
    """Writes the files; use it in a `with` statement, at the end of which they are whole.

    Example: `with ArrayWriter(folder) as writer: writer.add(trajectories, renderer.render_batch(trajectories))`.
    """

    def __init__(self, folder: Path) -> None:
        """Makes the files in an existing folder."""
        self._folder = folder
        self._streams: dict[str, BinaryIO] = {}
        self._open = ExitStack()
        self._sizes = dict.fromkeys(FLAT, 0)
        self._rows: list[npt.NDArray[np.void]] = []
        self._tasks: dict[TaskId, int] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name, dtype in FLAT.items():
                self._streams[name] = stack.enter_context(open(self._folder / f"{name}.npy", "wb"))
                _write_header(self._streams[name], dtype, 0)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._open:
            if kind is None:
                self._finish()

    def add(self, trajectories: Sequence[Trajectory], rendered: Sequence[RenderedTrajectory], first_index: int) -> None:
        """Adds the rows of trajectories, of which the first one has the index `first_index`."""
        rows = []
        for one in rendered:
            for name in FLAT:
                values = getattr(one, name)
                if values is not None:
                    self._streams[name].write(np.ascontiguousarray(values, FLAT[name]).data)
                    self._sizes[name] += values.size
            rows.append(self._row(trajectories[one.index - first_index], one))
        self._rows.append(np.array(rows, ROW))

    def _row(self, trajectory: Trajectory, one: RenderedTrajectory) -> tuple[Any, ...]:
        counts = (trajectory.epoch, trajectory.step)
        known = (one.reward, one.advantage)
        return (
            one.tokens.size,
            one.turn_ends.size,
            self._tasks.setdefault(one.task_id, len(self._tasks)),
            one.index,
            *(-1 if count is None else count for count in counts),
            int(one.loss_mask.sum()),
            int(one.tokens.max()),
            *(np.nan if value is None else value for value in known),
            one.logprobs is not None,
            one.advantages is not None,
        )

    def _finish(self) -> None:
        for name, stream in self._streams.items():
            stream.seek(0)
            _write_header(stream, FLAT[name], self._sizes[name])
        np.save(self._folder / ROWS_FILE, np.concatenate([np.empty(0, ROW), *self._rows]))
        (self._folder / TASKS_FILE).write_text(json.dumps(list(self._tasks)), encoding="utf-8")


class MappedArray:
    """An array of a file that is mapped into memory; its pages can be given back.

    Example: `MappedArray(folder / "tokens.npy").values[:5]` reads one page of the file.
    """

    def __init__(self, file: Path) -> None:
        # Mapped as a private copy, so that the array has the type of one in memory, which compiled functions ask for.
        mapped = np.load(file, mmap_mode="c")
        self._map = mapped.base
        self.values: npt.NDArray[Any] = np.asarray(mapped)
        """The whole array."""

    def release(self) -> None:
        """Gives the pages back that were read; they are read again where they are needed."""
        if isinstance(self._map, mmap.mmap):
            self._map.madvise(mmap.MADV_DONTNEED)


def _write_header(stream: BinaryIO, dtype: np.dtype[Any], size: int) -> None:
    """The header of an array; it leaves room for the digits of every size, so that it can be written again."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(stream, header)
