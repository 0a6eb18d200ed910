"""The rendered trajectories of a file or folder, task by task, out of arrays that are mapped into memory."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treering.data.cache.arrays import CONTENTS, FLAT, PICTURES_FILE, ROWS_FILE, TASKS_FILE, MappedArray
from treering.data.picture import PlacedPicture
from treering.data.pictures.source import PictureSource
from treering.data.pictures.stored import OpenPicture, StoredPicture
from treering.data.rendering.rendered_trajectory import RenderedTrajectory
from treering.data.trajectory import TaskId
from treering.types import TokenIds

_RELEASE_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFacts:
    """What is known of a whole file or folder."""

    source: str
    """Its path, as it was named."""
    num_trajectories: int
    num_rejected: int
    """Rejected sides of preference pairs."""
    warnings: tuple[str, ...]
    """Said where it is read: sentences that begin with the path."""
    notes: tuple[str, ...]
    """Sentences for who trains on it; see `DataNotes`."""
    form: str | None
    """How chats have become text; see `Renderer.form_in_words`."""
    tokenizer: str | None
    """Its folder, as it was named."""
    picture_files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each local file of a picture, by the name that the records give it."""

    def named(self, source: str, tokenizer: str | None) -> "DatasetFacts":
        """The same facts of an equal file that has another name, and of an equal tokenizer."""
        form = self.form
        if form is not None and self.tokenizer is not None and tokenizer is not None:
            form = form.replace(self.tokenizer, tokenizer)
        warnings = tuple(_renamed(text, self.source, source) for text in self.warnings)
        notes = tuple(self.notes)
        return replace(self, source=source, tokenizer=tokenizer, form=form, warnings=warnings, notes=notes)


class TokenDataset:
    """R rendered trajectories, the rows, in file order, and the tasks that they belong to.

    What it hands out are views of mapped files: they cost no memory that the system cannot take back.

    Example: of rows of the tasks a, b, a there are two tasks, and `task(0)` is the first and the third row.
    """

    def __init__(self, folder: Path, facts: DatasetFacts, open_picture: OpenPicture | None = None) -> None:
        """Maps the files of a folder that `ArrayWriter` has written; they may be deleted then.

        `open_picture` makes the values of pictures, see `StoredPicture`; None where there are none.
        """
        self.facts = facts
        """What is known of the whole."""
        self.rows: npt.NDArray[np.void] = np.load(folder / ROWS_FILE)
        """[R] records of `arrays.ROW`."""
        self.task_ids: tuple[TaskId, ...] = tuple(json.loads((folder / TASKS_FILE).read_text(encoding="utf-8")))
        """In order of first appearance."""
        self._arrays = {name: MappedArray(folder / f"{name}.npy") for name in FLAT}
        rows = self.rows
        sizes = dict.fromkeys(FLAT, rows["num_tokens"]) | {"turn_ends": rows["num_turns"]}
        sizes |= dict.fromkeys(("picture_starts", "picture_numbers"), rows["num_pictures"])
        self.pictures = _pictures(folder, open_picture)
        """The distinct pictures of all rows."""
        for name in ("logprobs", "advantages"):
            sizes[name] = np.where(rows[f"has_{name}"], rows["num_tokens"], 0)
        self._offsets = {name: _offsets(size) for name, size in sizes.items()}
        self._by_task = np.argsort(rows["task"], kind="stable")
        self._task_bounds = np.searchsorted(rows["task"][self._by_task], np.arange(len(self.task_ids) + 1))
        self._num_handed_out = 0

    @property
    def num_rows(self) -> int:
        """R."""
        return self.rows.size

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.task_ids)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """int64 [R], tokens of each row."""
        return self.rows["num_tokens"]

    @property
    def flat_tokens(self) -> tuple[TokenIds, npt.NDArray[np.int64]]:
        """The tokens of all rows one after another, int32 [F], and where each row begins, int64 [R + 1]."""
        return self._arrays["tokens"].values, self._offsets["tokens"]

    @property
    def flat_keys(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """As `flat_tokens`, with -(1 + n) for each token of the picture `pictures[n]`: equal keys are equal inputs.

        A copy where there are pictures.
        """
        tokens, offsets = self.flat_tokens
        if not self.pictures:
            return tokens, offsets
        keys = tokens.copy()
        for row in np.flatnonzero(self.rows["num_pictures"]).tolist():
            for number, placed in zip(self._part("picture_numbers", row), self.placed(row), strict=True):
                keys[offsets[row] + placed.start : offsets[row] + placed.stop] = -1 - number
        return keys, offsets

    def rows_of(self, task: int) -> npt.NDArray[np.int64]:
        """The numbers of a task's rows, ascending."""
        return self._by_task[self._task_bounds[task] : self._task_bounds[task + 1]]

    def task(self, task: int) -> list[RenderedTrajectory]:
        """The rows of a task, in file order."""
        return [self.row(int(row)) for row in self.rows_of(task)]

    def largest_id(self, task: int) -> int:
        """The largest token id of a task."""
        return int(self.rows["largest_id"][self.rows_of(task)].max())

    def tasks(self) -> Iterator[list[RenderedTrajectory]]:
        """The rows of each task, in order of first appearance."""
        return (self.task(task) for task in range(self.num_tasks))

    @property
    def last_turn_ends(self) -> npt.NDArray[np.int64]:
        """int64 [R]: one past the last trained token of each row, 0 where nothing is trained."""
        ends, stops = self._arrays["turn_ends"].values, self._offsets["turn_ends"][1:]
        has_turns = self.rows["num_turns"] > 0
        found = np.zeros(self.num_rows, np.int64)
        found[has_turns] = ends[stops[has_turns] - 1]
        return found

    @property
    def turn_ends(self) -> npt.NDArray[np.int32]:
        """int32 [turns of all rows], one past the last trained token of each."""
        return self._arrays["turn_ends"].values

    def tokens(self, row: int) -> TokenIds:
        """The tokens of a row, int32 [T]; what is counted is given back to the system in time."""
        self._count(int(self.rows["num_tokens"][row]))
        return self._part("tokens", row)

    def row(self, row: int) -> RenderedTrajectory:
        """A row by its number."""
        record = self.rows[row]
        return RenderedTrajectory(
            task_id=self.task_ids[record["task"]],
            tokens=self.tokens(row),
            loss_mask=self._part("loss_mask", row),
            turn_ends=self._part("turn_ends", row),
            index=int(record["index"]),
            reward=_known(record["reward"]),
            advantage=_known(record["advantage"]),
            epoch=_counted(record["epoch"]),
            step=_counted(record["step"]),
            advantages=self._part("advantages", row) if record["has_advantages"] else None,
            logprobs=self._part("logprobs", row) if record["has_logprobs"] else None,
            pictures=self.placed(row),
        )

    def placed(self, row: int) -> tuple[PlacedPicture, ...]:
        """The pictures of a row, in order."""
        if not self.rows["num_pictures"][row]:
            return ()
        places = zip(self._part("picture_starts", row), self._part("picture_numbers", row), strict=True)
        return tuple(PlacedPicture(start=int(start), picture=self.pictures[number]) for start, number in places)

    def release(self) -> None:
        """Gives the memory of what was read back to the system; views stay valid and read it again."""
        for array in self._arrays.values():
            array.release()

    def _count(self, num_tokens: int) -> None:
        self._num_handed_out += num_tokens
        if self._num_handed_out > _RELEASE_TOKENS:
            self._num_handed_out = 0
            self.release()

    def _part(self, name: str, row: int) -> npt.NDArray[Any]:
        offsets = self._offsets[name]
        return self._arrays[name].values[offsets[row] : offsets[row + 1]]


def _pictures(folder: Path, open_picture: OpenPicture | None) -> tuple[StoredPicture, ...]:
    records = np.load(folder / PICTURES_FILE)
    if not records.size:
        return ()
    assert open_picture is not None, "messages with pictures have a tokenizer, and its folder the processor"
    contents, ends = MappedArray(folder / f"{CONTENTS}.npy").values, np.cumsum(records["num_bytes"]).tolist()
    return tuple(
        StoredPicture(
            source=PictureSource(content=contents[start:stop].data, where=f"picture {number}"),
            open_picture=open_picture,
            size=(int(record["size"][0]), int(record["size"][1])),
            grid=None if record["grid"][0] < 0 else _triple(record["grid"]),
            num_tokens=int(record["num_tokens"]),
            digest=record["digest"].tobytes(),
        )
        for number, (record, start, stop) in enumerate(zip(records, [0, *ends[:-1]], ends, strict=True))
    )


def _triple(grid: npt.NDArray[np.int64]) -> tuple[int, int, int]:
    time, height, width = (int(count) for count in grid)
    return time, height, width


def _renamed(text: str, old: str, new: str) -> str:
    """A sentence about `old`, or a file in it, as one about `new`; others are left as they are."""
    is_of = text.startswith((f"{old}:", f"{old}/"))
    return new + text.removeprefix(old) if is_of else text


def _offsets(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _known(value: np.float64) -> float | None:
    return None if np.isnan(value) else float(value)


def _counted(value: np.int64) -> int | None:
    return None if value < 0 else int(value)
