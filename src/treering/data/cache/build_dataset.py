"""Build the arrays of a trajectory file in one pass, part by part, so that memory never holds the whole file.

A large file is rendered by several processes, in file order. Trajectories are counted for notes to the user.
"""

import multiprocessing
import os
import signal
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, groupby, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from treering.data.cache.dataset import ArrayWriter, DatasetFacts
from treering.data.formats.containers import read_records, source_files
from treering.data.formats.reader import FailedRuns, FormatName, RecordReader
from treering.data.formats.record_files import ReadPosition
from treering.data.rendering.renderer import Count, Renderer
from treering.data.trajectory import RenderedTrajectory, Trajectory
from treering.errors import DataWarning, InputError, StateError, plural
from treering.types import TokenIds, num_common


class DataNotes:
    """Counts of trajectories and tokens, from which `sentences` makes notes to the user."""

    def __init__(self) -> None:
        self._num_ids = self._num_bare = 0
        self._num_chats = self._num_several = 0
        self._num_branches = self._num_flat = self._num_unique = 0

    def add(self, trajectories: Sequence[Trajectory], rendered: Sequence[RenderedTrajectory]) -> None:
        """Count trajectories and their rendered branches."""
        ids = [one for one in trajectories if one.tokens is not None]
        self._num_ids += len(ids)
        self._num_bare += sum(one.loss_mask is None for one in ids)
        for _, group in groupby(rendered, key=lambda one: one.index):
            branches = [one.tokens for one in group]
            self._num_chats += 1
            if len(branches) > 1:
                self._num_several += 1
                self._num_branches += len(branches)
                self._num_flat += sum(branch.size for branch in branches)
                self._num_unique += num_distinct(branches)

    def sentences(self) -> list[str]:
        """Return at most one sentence on branches and one on masks."""
        found = []
        if self._num_several:
            found.append(
                f"the chat template rewrites history, so {self._num_several} of {plural(self._num_chats, 'chat')} "
                f"{'is' if self._num_several == 1 else 'are'} one branch "
                f"a turn, {self._num_branches} branches: of their {self._num_flat:,} tokens "
                f"{self._num_flat - self._num_unique:,} are shared"
            )
        if self._num_bare:
            found.append(
                f"{self._num_bare} of {plural(self._num_ids, 'trajectory', 'trajectories')} of token ids "
                f"{'has' if self._num_bare == 1 else 'have'} no loss_mask, so every token of "
                "theirs is trained, prompts too"
            )
        return found


def num_distinct(branches: Sequence[TokenIds]) -> int:
    """Return the number of tokens if branches share their common prefixes.

    Example:
        >>> num_distinct([np.array([1, 2, 3], np.int32), np.array([1, 2, 4, 5], np.int32)])
        5
    """
    # In lexical order a branch shares its longest prefix with its predecessor; big-endian bytes sort like their ids.
    ordered = sorted((branch.astype(">i4") for branch in branches), key=lambda branch: branch.tobytes())
    return sum(branch.size for branch in ordered) - sum(num_common(*pair) for pair in pairwise(ordered))


MAX_WORKERS = 4
"""Largest number of rendering processes; each holds a tokenizer and a part."""

_Part: TypeAlias = tuple[int, list[Trajectory]]
"""Trajectories, and the index of the first."""
_Rendered: TypeAlias = tuple[list[Trajectory], list[RenderedTrajectory]]


def num_workers_here() -> int:
    """Return the number of processors that this process may use, at most `MAX_WORKERS`."""
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)


def render_parts(renderer: Renderer, parts: Iterable[_Part], num_workers: int) -> Iterator[_Rendered]:
    """Yield each part with its rows, in order; with fewer than 2 workers, this process renders."""
    if num_workers < 2:
        for first, part in parts:
            yield part, renderer.render_batch(part, first)
        return
    with ExitStack() as stack:
        workers = [stack.enter_context(_worker(renderer)) for _ in range(num_workers)]
        sent: deque[tuple[Connection, list[Trajectory]]] = deque()
        for worker, numbered in zip(cycle(workers), parts, strict=False):
            # Round robin with one part per worker keeps the order, and no two processes wait for each other's pipe.
            done = [_received(renderer, *sent.popleft())] if len(sent) == num_workers else []
            with _killed():
                worker.send(numbered)
            sent.append((worker, numbered[1]))
            yield from done
        for worker, part in sent:
            yield _received(renderer, worker, part)


def _received(renderer: Renderer, worker: Connection, part: list[Trajectory]) -> _Rendered:
    with _killed():
        found, counts, sentences = worker.recv()
    for sentence in sentences:
        warnings.warn(sentence, DataWarning, stacklevel=2)
    if isinstance(found, Exception):
        raise found
    renderer.counts.update(counts)
    return part, found


@contextmanager
def _killed() -> Iterator[None]:
    """Turn the end of a worker's connection into an error with a fix."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise StateError(
            "a process that renders trajectories was killed, perhaps because memory is full; free some, and start again"
        ) from error


@contextmanager
def _worker(renderer: Renderer) -> Iterator[Connection]:
    # A fork of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    settings = {"tokenizer": renderer.tokenizer, "template": renderer.template, "date": renderer.date}
    process = context.Process(target=_work, args=(its, settings), daemon=True)
    process.start()
    its.close()
    try:
        yield ours
    finally:
        process.terminate()
        process.join()
        ours.close()


def _work(connection: Connection, settings: dict[str, Any]) -> None:
    """Render parts until the parent closes the connection or ends."""
    # The parent handles Ctrl-C and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    renderer = Renderer(**settings)
    try:
        while True:
            first, part = connection.recv()
            connection.send(_rendered(renderer, first, part))
    except (EOFError, ConnectionError):
        return


def _rendered(
    renderer: Renderer, first_index: int, part: list[Trajectory]
) -> tuple[list[RenderedTrajectory] | Exception, Counter[Count], list[str]]:
    """Return the rows or the error, the counts, and the data warnings."""
    renderer.counts = Counter()
    found: list[RenderedTrajectory] | Exception
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DataWarning)
        try:
            found = renderer.render_batch(part, first_index)
        except Exception as error:
            found = error
    return found, renderer.counts, list(dict.fromkeys(str(each.message) for each in caught))


PART_SIZE = 1 << 20
"""Size of a part: characters of messages, bytes of their images, or token ids, plus `_RECORD_SIZE` per trajectory. A
template that rewrites history multiplies it."""
_RECORD_SIZE = 256
"""Overhead of a trajectory, besides its text."""
_LARGE = 8_000_000
"""Bytes of a file that is worth several processes."""
_REPORT_EVERY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options for reading the records of a file; see `read_trajectories`."""

    format: FormatName = "auto"
    failed: FailedRuns = "left_out"
    may_be_torn: bool = False
    refuses_pairs: bool = False
    """Whether the rejected side of a preference pair is an error; the arrays are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildProgress:
    """Progress of a build."""

    num_records: int
    num_read: int
    """Stored bytes that have been read."""
    num_bytes: int
    """Stored bytes of all files."""


OnBuild = Callable[[BuildProgress], None]


def build(
    folder: Path,
    path: Path,
    renderer: Renderer,
    options: ReadOptions,
    on_progress: OnBuild | None = None,
    num_workers: int = 0,
) -> DatasetFacts:
    """Write the arrays of a file or folder of trajectories into the existing `folder`.

    Warnings are returned with the facts, not given. A large file is rendered by `num_workers` processes.
    """
    reader = RecordReader(str(path), options.format, options.failed)
    notes, num_trajectories, num_rejected, num_chats = DataNotes(), 0, 0, renderer.counts["chats"]
    parts = _parts(path, reader, options, on_progress)
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
            # Also if the renderer raises.
            reader.warn()
        if not num_trajectories:
            raise InputError(f"{path}: a trajectory file holds at least one trajectory, got 0; check the file")
        texts = renderer.notes
        renderer.warn()
    return DatasetFacts(
        source=str(path),
        num_trajectories=num_trajectories,
        num_rejected=num_rejected,
        warnings=tuple(kept),
        notes=(*notes.sentences(), *texts),
        tokenizer=None if renderer.tokenizer is None else str(renderer.tokenizer),
        form=renderer.form_note if renderer.counts["chats"] > num_chats else None,
        image_files=writer.image_files,
    )


def check_no_pairs(path: Path, num_rejected: int) -> None:
    """Refuse preference pairs for supervised training, which would train the rejected answers too."""
    if num_rejected:
        raise InputError(
            f"{path}: supervised training would train the rejected answers of preference pairs too; use "
            "treering.objectives.dpo, or write the chosen ones as prompt and completion"
        )


@contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """Collect the distinct warnings of the block; give them at its end if it raises."""
    kept: list[str] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DataWarning)
            try:
                yield kept
            finally:
                kept += dict.fromkeys(str(each.message) for each in caught)
    except Exception:
        for text in kept:
            warnings.warn(text, DataWarning, stacklevel=5)
        raise


def _parts(path: Path, reader: RecordReader, options: ReadOptions, on_progress: OnBuild | None) -> Iterator[_Part]:
    position, num_bytes, reported = ReadPosition(), _num_bytes(path), time.monotonic()
    part: list[Trajectory] = []
    first = size = 0
    records = read_records(path, may_be_torn=options.may_be_torn, position=position)
    try:
        for num_records, (where, record) in enumerate(records, start=1):
            found = reader.decode(where, record)
            if options.refuses_pairs:
                check_no_pairs(path, sum(one.preference == "rejected" for one in found))
            part += found
            size += sum(map(_size, found))
            if size >= PART_SIZE:
                yield first, part
                first, part, size = first + len(part), [], 0
            if on_progress is not None and time.monotonic() - reported > _REPORT_EVERY_S:
                reported = time.monotonic()
                on_progress(BuildProgress(num_records=num_records, num_read=position.num_read, num_bytes=num_bytes))
    except InputError:
        reader.forget()
        raise
    if part:
        yield first, part


def _size(trajectory: Trajectory) -> int:
    if trajectory.messages is None:
        assert trajectory.tokens is not None, "a trajectory has messages or tokens"
        return _RECORD_SIZE + int(trajectory.tokens.size)
    size = _RECORD_SIZE
    for message in trajectory.messages:
        size += len(message.content or "") + len(message.reasoning or "")
        size += sum(len(call.arguments_text) for call in message.tool_calls)
        size += sum(len(image.source.content or b"") for image in message.images)
    return size


def _num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in source_files(path) if file.is_file())
