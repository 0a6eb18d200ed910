"""The rendered trajectories of a file or folder as arrays in a folder: written part by part, then mapped into memory.

R rendered trajectories   F their tokens   P distinct images
"""

import hashlib
import json
import mmap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from treering.data.image import DIGEST_BYTES, ImageData, ImageSource, OpenImage, PlacedImage, StoredImage
from treering.data.routed_experts import merge_routes
from treering.data.trajectory import RenderedTrajectory, TaskId
from treering.types import TokenIds

ROWS_FILE, TASKS_FILE = "rows.npy", "tasks.json"

FLAT = MappingProxyType(
    {
        "tokens": np.dtype("<i4"),
        "loss_mask": np.dtype("?"),
        "turn_ends": np.dtype("<i4"),
        "logprobs": np.dtype("<f8"),
        "advantages": np.dtype("<f8"),
        "image_starts": np.dtype("<i4"),
        "image_numbers": np.dtype("<i4"),
        "routed_experts": np.dtype("<i2"),
    }
)
"""Flat arrays over all rows, each in a file of its name; rows without log-probs, advantages, images or routes take no
space."""
CONTENTS = "image_contents"
"""Name of the file with the encoded bytes of all distinct images, uint8."""
_DTYPES = {**FLAT, CONTENTS: np.dtype("u1")}
IMAGES_FILE = "images.npy"

ROW = np.dtype(
    [
        *((name, "<i8") for name in ("num_tokens", "num_turns", "num_images", "task", "index", "epoch", "step")),
        *((name, "<i8") for name in ("num_prompt_tokens", "num_sampled", "largest_id")),
        *((name, "<f8") for name in ("reward", "advantage")),
        *((name, "?") for name in ("has_logprobs", "has_advantages")),
        ("route_shape", "<i8", 2),
    ]
)
"""Record of a row; -1 and NaN stand for None. `route_shape` is layers and experts per token, zeros without routes."""
IMAGE = np.dtype(
    [
        ("size", "<i8", 2),
        ("grid", "<i8", 3),
        ("num_tokens", "<i8"),
        ("num_bytes", "<i8"),
        ("digest", "u1", DIGEST_BYTES),
    ]
)
"""Record of a distinct image; a grid of -1 stands for None."""


class ArrayWriter:
    """Writer of a dataset's files, which are whole at the end of its `with` statement."""

    def __init__(self, folder: Path) -> None:
        """Write to an existing folder."""
        self._folder = folder
        self._streams: dict[str, BinaryIO] = {}
        self._open = ExitStack()
        self._sizes = dict.fromkeys(_DTYPES, 0)
        self._rows = bytearray()
        self._tasks: dict[TaskId, int] = {}
        self._image_numbers: dict[bytes, int] = {}
        self._images: list[tuple[Any, ...]] = []
        self.image_files: dict[str, str] = {}
        """SHA-256 of each local image file, by its name in the records."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name, dtype in _DTYPES.items():
                self._streams[name] = stack.enter_context(open(self._folder / f"{name}.npy", "wb"))
                _write_header(self._streams[name], dtype, 0)
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._open:
            if kind is None:
                self._finish()

    def add(self, rows: Sequence[RenderedTrajectory]) -> None:
        """Append rows."""
        for one in rows:
            numbers = [self._image_number(placed.image) for placed in one.images]
            starts = [placed.start for placed in one.images]
            values = {"image_starts": np.array(starts), "image_numbers": np.array(numbers)}
            for name in FLAT:
                self._add(name, values[name] if name in values else getattr(one, name))
        self._rows += np.array([self._row(one) for one in rows], ROW).tobytes()

    def _add(self, name: str, values: npt.NDArray[Any] | None) -> None:
        if values is not None:
            self._streams[name].write(np.ascontiguousarray(values, _DTYPES[name]).data)
            self._sizes[name] += values.size

    def _image_number(self, image: ImageData) -> int:
        """Return the number of an image, whose bytes are written once."""
        assert isinstance(image, StoredImage), "the images of a file are encoded"
        source = image.source
        is_new = image.digest not in self._image_numbers
        is_new_file = source.file not in (None, *self.image_files)
        content = source.read() if is_new or is_new_file else b""
        if source.file is not None and is_new_file:
            self.image_files[source.file] = hashlib.sha256(content).hexdigest()
        if is_new:
            self._image_numbers[image.digest] = len(self._images)
            digest = np.frombuffer(image.digest, np.uint8)
            self._images.append((image.size, image.grid or (-1, -1, -1), image.num_tokens, len(content), digest))
            self._add(CONTENTS, np.frombuffer(content, np.uint8))
        return self._image_numbers[image.digest]

    def _row(self, one: RenderedTrajectory) -> tuple[Any, ...]:
        counts, known = (one.epoch, one.step), (one.reward, one.advantage)
        return (
            one.tokens.size,
            one.turn_ends.size,
            len(one.images),
            self._tasks.setdefault(one.task_id, len(self._tasks)),
            one.index,
            *(-1 if count is None else count for count in counts),
            one.num_prompt_tokens,
            int(one.loss_mask.sum()),
            int(one.tokens.max()),
            *(np.nan if value is None else value for value in known),
            one.logprobs is not None,
            one.advantages is not None,
            (0, 0) if one.routed_experts is None else one.routed_experts.shape[1:],
        )

    def _finish(self) -> None:
        for name, stream in self._streams.items():
            stream.seek(0)
            _write_header(stream, _DTYPES[name], self._sizes[name])
        np.save(self._folder / IMAGES_FILE, np.array(self._images, IMAGE))
        np.save(self._folder / ROWS_FILE, np.frombuffer(self._rows, ROW))
        (self._folder / TASKS_FILE).write_text(json.dumps(list(self._tasks)), encoding="utf-8")


class MappedArray:
    """An array file mapped into memory; `release` frees its pages."""

    def __init__(self, file: Path) -> None:
        # A private copy is writable, which the signatures of compiled functions require.
        mapped = np.load(file, mmap_mode="c")
        self._map = mapped.base
        self.values: npt.NDArray[Any] = np.asarray(mapped)
        """The whole array."""

    def release(self) -> None:
        """Free the pages that were read; a later access reads them again."""
        if isinstance(self._map, mmap.mmap):
            self._map.madvise(mmap.MADV_DONTNEED)


def _write_header(stream: BinaryIO, dtype: np.dtype[Any], size: int) -> None:
    # The header has room for any size, so that it can be overwritten.
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(stream, header)


_RELEASE_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFacts:
    """Facts about a whole file or folder."""

    source: str
    """Path of the file or folder, as the caller named it."""
    num_trajectories: int
    num_rejected: int
    """Rejected sides of preference pairs."""
    warnings: tuple[str, ...]
    """Data warnings, each beginning with the path."""
    notes: tuple[str, ...]
    """Notes to the user who trains on it; see `DataNotes`."""
    form: str | None
    """How chats became text; see `Renderer.form_note`."""
    tokenizer: str | None
    """Folder of the tokenizer, as the caller named it."""
    image_files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each local image file, by its name in the records."""

    def named(self, source: str, tokenizer: str | None) -> "DatasetFacts":
        """Return the facts with the names of an equal file and an equal tokenizer."""
        form = self.form
        if form is not None and self.tokenizer is not None and tokenizer is not None:
            form = form.replace(self.tokenizer, tokenizer)
        # A warning begins with the path, or with a file in it.
        old = self.source
        warnings = (
            source + text.removeprefix(old) if text.startswith((f"{old}:", f"{old}/")) else text
            for text in self.warnings
        )
        # The cache stores lists.
        return replace(
            self, source=source, tokenizer=tokenizer, form=form, warnings=tuple(warnings), notes=tuple(self.notes)
        )


class TokenDataset:
    """R rendered trajectories, the rows, in file order, and their tasks.

    Arrays are views of mapped files, whose memory the system can reclaim.

    Example: rows of the tasks a, b, a have two tasks, and `task(0)` returns the first and the third row.
    """

    def __init__(self, folder: Path, facts: DatasetFacts, open_image: OpenImage | None = None) -> None:
        """Map the files that `ArrayWriter` wrote into a folder; afterwards they may be deleted.

        `open_image` computes the pixel values of images, see `StoredImage`; None without images.
        """
        self.facts = facts
        """Facts about the whole file."""
        self.rows: npt.NDArray[np.void] = np.load(folder / ROWS_FILE)
        """[R] records of `ROW`."""
        self.task_ids: tuple[TaskId, ...] = tuple(json.loads((folder / TASKS_FILE).read_text(encoding="utf-8")))
        """Ids of the tasks, in order of first appearance."""
        self._arrays = {name: MappedArray(folder / f"{name}.npy") for name in FLAT}
        rows = self.rows
        sizes = dict.fromkeys(FLAT, rows["num_tokens"]) | {"turn_ends": rows["num_turns"]}
        sizes |= dict.fromkeys(("image_starts", "image_numbers"), rows["num_images"])
        self.images = _images(folder, open_image)
        """The P distinct images of all rows."""
        for name in ("logprobs", "advantages"):
            sizes[name] = np.where(rows[f"has_{name}"], rows["num_tokens"], 0)
        sizes["routed_experts"] = rows["num_tokens"] * rows["route_shape"].prod(-1)
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
        """Tokens with -(1 + n) at each token of the image `images[n]`, int32 [F], and offsets, int64 [R + 1].

        Equal keys are equal inputs of the model. With routes, they number pairs of a token and its route.
        """
        tokens, offsets = self.flat_tokens
        if self.has_routes:
            routes = [self.routes(row) for row in range(self.num_rows)]
            return merge_routes(np.array(tokens), routes, self.lengths.tolist()).ids, offsets
        if not self.images:
            return tokens, offsets
        keys = tokens.copy()
        for row in np.flatnonzero(self.rows["num_images"]).tolist():
            for number, placed in zip(self._part("image_numbers", row), self.placed(row), strict=True):
                keys[offsets[row] + placed.start : offsets[row] + placed.stop] = -1 - number
        return keys, offsets

    def rows_of(self, task: int) -> npt.NDArray[np.int64]:
        """Return the numbers of a task's rows, ascending."""
        return self._by_task[self._task_bounds[task] : self._task_bounds[task + 1]]

    def task(self, task: int) -> list[RenderedTrajectory]:
        """Return the rows of a task, in file order."""
        return [self.row(int(row)) for row in self.rows_of(task)]

    def largest_id(self, task: int) -> int:
        """Return the largest token id of a task."""
        return int(self.rows["largest_id"][self.rows_of(task)].max())

    @property
    def last_turn_ends(self) -> npt.NDArray[np.int64]:
        """int64 [R]: one past the last trained token of each row, 0 where nothing is trained."""
        ends, stops = self._arrays["turn_ends"].values, self._offsets["turn_ends"][1:]
        has_turns = self.rows["num_turns"] > 0
        found = np.zeros(self.num_rows, np.int64)
        found[has_turns] = ends[stops[has_turns] - 1]
        return found

    @property
    def num_trained(self) -> int:
        """Trained tokens of all rows."""
        return int(np.count_nonzero(self._arrays["loss_mask"].values))

    def copies(self) -> list[tuple[int, int]]:
        """Return pairs of a row and the first earlier row with the same tokens, images, routes and mask, ascending."""
        first: dict[bytes, int] = {}
        found = []
        for row in range(self.num_rows):
            digest = blake2b(self.tokens(row).tobytes(), digest_size=16)
            digest.update(self._part("loss_mask", row).tobytes())
            for placed in self.placed(row):
                digest.update(placed.image.digest)
            digest.update(self._part("routed_experts", row).tobytes())
            if (other := first.setdefault(digest.digest(), row)) != row:
                found.append((row, other))
        return found

    @property
    def turn_ends(self) -> npt.NDArray[np.int32]:
        """int32 [turns of all rows], one past the last trained token of each."""
        return self._arrays["turn_ends"].values

    def tokens(self, row: int) -> TokenIds:
        """Return the tokens of a row, int32 [T]; their memory is released from time to time."""
        self._count(int(self.rows["num_tokens"][row]))
        return self._part("tokens", row)

    def row(self, row: int) -> RenderedTrajectory:
        """Return a row by its number."""
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
            images=self.placed(row),
            routed_experts=self.routes(row),
        )

    @property
    def has_routes(self) -> bool:
        """Whether any row has routes of a mixture of experts."""
        return bool(self.rows["route_shape"].any())

    def routes(self, row: int) -> npt.NDArray[np.int16] | None:
        """Return the experts of each token of a row, int16 [T, layers, experts per token]; None without routes."""
        layers, experts = self.rows["route_shape"][row].tolist()
        return self._part("routed_experts", row).reshape(-1, layers, experts) if layers else None

    def placed(self, row: int) -> tuple[PlacedImage, ...]:
        """Return the images of a row, in order."""
        if not self.rows["num_images"][row]:
            return ()
        found = zip(self._part("image_starts", row), self._part("image_numbers", row), strict=True)
        return tuple(PlacedImage(start=int(start), image=self.images[number]) for start, number in found)

    def release(self) -> None:
        """Free the memory of all arrays; views stay valid and read the files again."""
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


def _images(folder: Path, open_image: OpenImage | None) -> tuple[StoredImage, ...]:
    records = np.load(folder / IMAGES_FILE)
    if not records.size:
        return ()
    assert open_image is not None, "messages with images have a tokenizer, and its folder the processor"
    contents, ends = MappedArray(folder / f"{CONTENTS}.npy").values, np.cumsum(records["num_bytes"]).tolist()
    return tuple(
        StoredImage(
            source=ImageSource(content=contents[start:stop].data, where=f"image {number}"),
            open_image=open_image,
            size=(int(record["size"][0]), int(record["size"][1])),
            grid=None if grid[0] < 0 else (grid[0], grid[1], grid[2]),
            num_tokens=int(record["num_tokens"]),
            digest=record["digest"].tobytes(),
        )
        for number, (record, grid, start, stop) in enumerate(
            zip(records, records["grid"].tolist(), [0, *ends[:-1]], ends, strict=True)
        )
    )


def _offsets(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _known(value: np.float64) -> float | None:
    return None if np.isnan(value) else float(value)


def _counted(value: np.int64) -> int | None:
    return None if value < 0 else int(value)
