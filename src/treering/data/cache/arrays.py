"""The arrays of rendered trajectories in a folder: written part by part, and mapped into memory.

R rendered trajectories   F their tokens   P distinct pictures
"""

import hashlib
import json
import mmap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from treering.data.picture import DIGEST_BYTES, Picture
from treering.data.pictures.stored import StoredPicture
from treering.data.rendering.rendered_trajectory import RenderedTrajectory
from treering.data.trajectory import TaskId

ROWS_FILE, TASKS_FILE = "rows.npy", "tasks.json"

FLAT = MappingProxyType(
    {
        "tokens": np.dtype("<i4"),
        "loss_mask": np.dtype("?"),
        "turn_ends": np.dtype("<i4"),
        "logprobs": np.dtype("<f8"),
        "advantages": np.dtype("<f8"),
        "picture_starts": np.dtype("<i4"),
        "picture_numbers": np.dtype("<i4"),
    }
)
"""Arrays of all rows one after another, each in a file of its name; rows without log-probs, advantages or pictures have
no part in theirs."""
CONTENTS = "picture_contents"
"""The encoded bytes of all distinct pictures one after another, uint8, in a file of that name."""
PICTURES_FILE = "pictures.npy"

ROW = np.dtype(
    [
        *((name, "<i8") for name in ("num_tokens", "num_turns", "num_pictures", "task", "index", "epoch", "step")),
        *((name, "<i8") for name in ("num_prompt_tokens", "num_sampled", "largest_id")),
        *((name, "<f8") for name in ("reward", "advantage")),
        *((name, "?") for name in ("has_logprobs", "has_advantages")),
    ]
)
"""What is known of a row; -1 and NaN stand for None."""
PICTURE = np.dtype(
    [
        ("size", "<i8", 2),
        ("grid", "<i8", 3),
        ("num_tokens", "<i8"),
        ("num_bytes", "<i8"),
        ("digest", "u1", DIGEST_BYTES),
    ]
)
"""What is known of a distinct picture; a grid of -1 stands for None."""


class ArrayWriter:
    """Writes the files; use it in a `with` statement, at the end of which they are whole.

    Example: `with ArrayWriter(folder) as writer: writer.add(renderer.render_batch(trajectories))`.
    """

    def __init__(self, folder: Path) -> None:
        """Makes the files in an existing folder."""
        self._folder = folder
        self._streams: dict[str, BinaryIO] = {}
        self._open = ExitStack()
        self._sizes = dict.fromkeys((*FLAT, CONTENTS), 0)
        self._rows = bytearray()
        self._pictures = PictureWriter()
        self._tasks: dict[TaskId, int] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name, dtype in {**FLAT, CONTENTS: np.dtype("u1")}.items():
                self._streams[name] = stack.enter_context(open(self._folder / f"{name}.npy", "wb"))
                _write_header(self._streams[name], dtype, 0)
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._open:
            if kind is None:
                self._finish()

    def add(self, rows: Sequence[RenderedTrajectory]) -> None:
        """Adds rows."""
        for one in rows:
            numbers = [self._pictures.number_of(placed.picture, self._add_content) for placed in one.pictures]
            starts = [placed.start for placed in one.pictures]
            values = {"picture_starts": np.array(starts), "picture_numbers": np.array(numbers)}
            for name in FLAT:
                self._add(name, values[name] if name in values else getattr(one, name))
        self._rows += np.array([self._row(one) for one in rows], ROW).tobytes()

    @property
    def picture_files(self) -> dict[str, str]:
        """SHA-256 of each local file of a picture, by the name that the records give it."""
        return self._pictures.files

    def _add_content(self, content: bytes) -> None:
        self._add(CONTENTS, np.frombuffer(content, np.uint8))

    def _add(self, name: str, values: npt.NDArray[Any] | None) -> None:
        if values is not None:
            dtype = FLAT.get(name, np.dtype("u1"))
            self._streams[name].write(np.ascontiguousarray(values, dtype).data)
            self._sizes[name] += values.size

    def _row(self, one: RenderedTrajectory) -> tuple[Any, ...]:
        counts, known = (one.epoch, one.step), (one.reward, one.advantage)
        return (
            one.tokens.size,
            one.turn_ends.size,
            len(one.pictures),
            self._tasks.setdefault(one.task_id, len(self._tasks)),
            one.index,
            *(-1 if count is None else count for count in counts),
            one.num_prompt_tokens,
            int(one.loss_mask.sum()),
            int(one.tokens.max()),
            *(np.nan if value is None else value for value in known),
            one.logprobs is not None,
            one.advantages is not None,
        )

    def _finish(self) -> None:
        for name, stream in self._streams.items():
            stream.seek(0)
            _write_header(stream, FLAT.get(name, np.dtype("u1")), self._sizes[name])
        np.save(self._folder / PICTURES_FILE, self._pictures.records)
        np.save(self._folder / ROWS_FILE, np.frombuffer(self._rows, ROW))
        (self._folder / TASKS_FILE).write_text(json.dumps(list(self._tasks)), encoding="utf-8")


class PictureWriter:
    """Numbers distinct pictures, each of which is written once."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self._numbers: dict[bytes, int] = {}
        self._records: list[tuple[Any, ...]] = []

    @property
    def records(self) -> npt.NDArray[np.void]:
        """[P] records of `PICTURE`."""
        return np.array(self._records, PICTURE)

    def number_of(self, picture: Picture, write: Callable[[bytes], None]) -> int:
        """The number of a picture; the bytes of a new one go to `write`."""
        assert isinstance(picture, StoredPicture), "a file has encoded pictures"
        source = picture.source
        is_new, is_new_file = picture.digest not in self._numbers, source.file not in (None, *self.files)
        content = source.read() if is_new or is_new_file else b""
        if source.file is not None and is_new_file:
            self.files[source.file] = hashlib.sha256(content).hexdigest()
        if is_new:
            self._numbers[picture.digest] = len(self._records)
            digest = np.frombuffer(picture.digest, np.uint8)
            grid = picture.grid or (-1, -1, -1)
            self._records.append((picture.size, grid, picture.num_tokens, len(content), digest))
            write(content)
        return self._numbers[picture.digest]


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
