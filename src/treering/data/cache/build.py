"""Reads, renders and tokenizes a file in one pass of parts, so that memory holds one part and not the file."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from treering.data.cache.arrays import ArrayWriter
from treering.data.cache.dataset import DatasetFacts
from treering.data.cache.workers import render_parts
from treering.data.formats.containers import read_records, source_files
from treering.data.formats.detect import FormatName
from treering.data.formats.files import ReadPosition
from treering.data.formats.reader import FailedRuns, RecordReader
from treering.data.notes import DataNotes
from treering.data.rendering.renderer import Renderer
from treering.data.trajectory import Message, Trajectory
from treering.errors import DataWarning, InputError

PART_SIZE = 1 << 20
"""Characters of messages, bytes of their pictures, or token ids, of a part, with `_RECORD_SIZE` for each trajectory; a
template that rewrites history makes a multiple of it."""
_RECORD_SIZE = 256
"""What a short trajectory takes besides its text."""
_LARGE = 8_000_000
"""Bytes of a file from which starting processes pays."""
_SAY_EVERY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How the records of a file are read; see `read_trajectories`."""

    format: FormatName = "auto"
    failed: FailedRuns = "left_out"
    may_be_torn: bool = False
    refuses_pairs: bool = False
    """Whether the rejected side of a preference pair is an error; the arrays are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildProgress:
    """How far a build is."""

    num_records: int
    num_read: int
    """Bytes that have been read, as they are stored."""
    num_bytes: int
    """All bytes."""


OnBuild = Callable[[BuildProgress], None]


def build(
    folder: Path,
    path: Path,
    renderer: Renderer,
    options: ReadOptions,
    on_progress: OnBuild | None = None,
    num_workers: int = 0,
) -> DatasetFacts:
    """Writes the arrays of a file or folder of trajectories into `folder`, which exists.

    Warnings are kept as facts, and not given. A large file is rendered by `num_workers` processes.

    Raises:
        InputError: as `read_trajectories` and `Renderer.render`.
    """
    reader = RecordReader(str(path), options.format, options.failed)
    notes, num_trajectories, num_rejected, num_chats = DataNotes(), 0, 0, renderer.counts.num_chats
    parts = _numbered(_parts(path, reader, options, on_progress), path, options)
    workers = num_workers if _num_bytes(path) >= _LARGE else 0
    with kept_warnings() as kept:
        try:
            with ArrayWriter(folder) as writer:
                for part, rendered in render_parts(renderer, parts, workers):
                    writer.add(rendered)
                    notes.add(part, rendered)
                    num_trajectories += len(part)
                    num_rejected += sum(one.preference == "rejected" for one in part)
        finally:
            # Also before what the renderer refuses.
            reader.warn()
        if not num_trajectories:
            raise InputError(f"{path}: a trajectory file holds at least one trajectory, got 0; check the file")
        renderer.warn()
    return DatasetFacts(
        source=str(path),
        num_trajectories=num_trajectories,
        num_rejected=num_rejected,
        warnings=tuple(kept),
        notes=tuple(notes.sentences()),
        tokenizer=None if renderer.tokenizer is None else str(renderer.tokenizer),
        form=renderer.form_in_words if renderer.counts.num_chats > num_chats else None,
        picture_files=writer.picture_files,
    )


def check_no_pairs(path: Path, num_rejected: int) -> None:
    """Refuses preference pairs where every answer would be trained.

    Raises:
        InputError: there is a rejected side.
    """
    if num_rejected:
        raise InputError(
            f"{path}: supervised training would train the rejected answers of preference pairs too; use "
            "treering.objectives.dpo, or write the chosen ones as prompt and completion"
        )


@contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """Collects the warnings of the block, equal ones once; they are given at its end if it raises."""
    kept: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DataWarning)
        try:
            yield kept
        except Exception as error:
            raised: Exception | None = error
        else:
            raised = None
    kept += dict.fromkeys(str(each.message) for each in caught)
    if raised is not None:
        for text in kept:
            warnings.warn(text, DataWarning, stacklevel=5)
        raise raised


def _numbered(
    parts: Iterable[list[Trajectory]], path: Path, options: ReadOptions
) -> Iterator[tuple[int, list[Trajectory]]]:
    """The parts with the index of their first trajectory."""
    first = 0
    for part in parts:
        if options.refuses_pairs:
            check_no_pairs(path, sum(one.preference == "rejected" for one in part))
        yield first, part
        first += len(part)


def _parts(
    path: Path, reader: RecordReader, options: ReadOptions, on_progress: OnBuild | None
) -> Iterator[list[Trajectory]]:
    position, num_bytes, told = ReadPosition(), _num_bytes(path), time.monotonic()
    part: list[Trajectory] = []
    size = 0
    for num_records, found in enumerate(_decoded(path, reader, options, position), start=1):
        part += found
        size += sum(map(_size, found))
        if size >= PART_SIZE:
            yield part
            part, size = [], 0
        if on_progress is not None and time.monotonic() - told > _SAY_EVERY_S:
            told = time.monotonic()
            on_progress(BuildProgress(num_records=num_records, num_read=position.num_read, num_bytes=num_bytes))
    if part:
        yield part


def _decoded(
    path: Path, reader: RecordReader, options: ReadOptions, position: ReadPosition
) -> Iterator[list[Trajectory]]:
    try:
        for where, record in read_records(path, may_be_torn=options.may_be_torn, position=position):
            yield reader.decode(where, record)
    except InputError:
        reader.forget()
        raise


def _size(trajectory: Trajectory) -> int:
    if trajectory.messages is None:
        assert trajectory.tokens is not None, "a trajectory has messages or tokens"
        return _RECORD_SIZE + int(trajectory.tokens.size)
    texts = sum(_num_characters(message) for message in trajectory.messages)
    pictures = sum(len(one.source.content or b"") for message in trajectory.messages for one in message.pictures)
    return _RECORD_SIZE + texts + pictures


def _num_characters(message: Message) -> int:
    calls = sum(len(call.arguments_text) for call in message.tool_calls)
    return len(message.content or "") + len(message.reasoning or "") + calls


def _num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in source_files(path) if file.is_file())
