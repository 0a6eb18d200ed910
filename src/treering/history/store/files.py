"""History files: the indexes that one publish changed, as plain arrays after a header, written whole or not at all.

    24 bytes   magic (8), size of the header (uint64) and its CRC-32 (uint64), little-endian   header
    JSON: {"whole", "removed", "prompts": [[prompt_id, versions, starts, num_tokens, CRC-32], ...]}   arrays
    for each prompt its text and its order, int32, little-endian

The state of a folder is its files in the order of their numbers: a file removes prompts, then adds or replaces its own.
A `whole` file makes all earlier ones obsolete. History is a hint (law 7), so a lost file costs only speed; the
checksums keep damaged positions away from compiled code.
"""

import json
import os
import re
import stat
import struct
import threading
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from treering.errors import InputError
from treering.files.writing import draft_path
from treering.history.store.prompt_index import PromptIndex
from treering.types import PromptId

_MAGIC = b"RINGHST4"
_PREFIX = struct.Struct("<8sQQ")
_NAME = re.compile(r"history-(\d{8,})\.bin")


class StoredIndex:
    """One prompt's index in a mapped file, which is read and checked on first use.

    Attributes:
        versions: versions of its rollouts, newest first.
        num_tokens: tokens of its rollouts.
        num_bytes: bytes of its arrays, equal to `PromptIndex.num_bytes`.
    """

    __slots__ = ("_checksum", "_data", "_file", "_index", "_lock", "_prompt_id", "_start", "_starts", "num_bytes",
                 "num_tokens", "versions")  # fmt: skip

    def __init__(self, data: mmap, start: int, file: Path, entry: Sequence[Any]) -> None:
        self._prompt_id, self.versions, self._starts, self.num_tokens, self._checksum = entry
        self.num_bytes = 8 * self._starts[-1] + 8 * (len(self.versions) + len(self._starts))
        self._data, self._start, self._file = data, start, file
        self._index: PromptIndex | None = None
        self._lock = threading.Lock()

    @property
    def index(self) -> PromptIndex:
        """The index, in the file's memory; a damaged one is replaced by an empty one, with a warning."""
        with self._lock:
            if self._index is None:
                self._index = self._read()
        return self._index

    def _read(self) -> PromptIndex:
        size, versions, starts = self._starts[-1], self.versions, self._starts
        end = self._start + 8 * size
        # A map keeps its original size, but reading past the end of a file that was cut since kills the process.
        if end > min(self._data.size(), len(self._data)):
            problem = "cut off"
        elif zlib.crc32(memoryview(self._data)[self._start : end]) != self._checksum:
            problem = "damaged: the checksum differs"
        else:
            arrays = np.frombuffer(self._data, "<i4", 2 * size, self._start).astype(np.int32, copy=False)
            return PromptIndex(
                text=arrays[:size],
                order=arrays[size:],
                versions=np.array(versions, np.int64),
                starts=np.array(starts, np.int64),
            )
        warnings.warn(
            f"the rollouts of prompt {self._prompt_id!r} in {self._file} are dropped: {problem}; this costs speed only",
            stacklevel=2,
        )
        nothing = np.empty(0, np.int32)
        return PromptIndex(text=nothing, order=nothing, versions=np.empty(0, np.int64), starts=np.zeros(1, np.int64))


class HistoryFile(NamedTuple):
    """Contents of a file."""

    is_whole: bool
    """Whether earlier files are obsolete."""
    removed: Sequence[PromptId]
    prompts: Mapping[PromptId, StoredIndex]


def write_file(
    file: Path, prompts: Iterable[tuple[PromptId, PromptIndex]], *, removed: Iterable[PromptId] = (), is_whole: bool
) -> int:
    """Write a file under a temporary name and rename it; skip prompts without rollouts; return its bytes.

    Raises:
        OSError: the folder is missing, read-only or full. An older file of that name stays.
    """
    entries, arrays = [], []
    for prompt_id, index in prompts:
        if index.text.size:
            parts = [np.ascontiguousarray(array, "<i4").data for array in (index.text, index.order)]
            checksum = zlib.crc32(parts[1], zlib.crc32(parts[0]))
            entries.append([prompt_id, index.versions.tolist(), index.starts.tolist(), index.num_tokens, checksum])
            arrays += parts
    header = json.dumps({"whole": is_whole, "removed": list(removed), "prompts": entries}).encode()
    header += b" " * (-len(header) % 8)
    draft = draft_path(file)
    try:
        with draft.open("wb") as stream:
            stream.writelines([_PREFIX.pack(_MAGIC, len(header), zlib.crc32(header)), header, *arrays])
            num_bytes = stream.tell()
        os.replace(draft, file)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    return num_bytes


def map_file(file: Path) -> HistoryFile:
    """Map a file into memory; its indexes are read on first use, and stay valid after the file is removed.

    Raises:
        OSError: the file cannot be opened.
        InputError: it is not a whole history file; with the reason.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            raise InputError("it is empty or not a file")
        data = mmap(descriptor, 0, access=ACCESS_READ)
    finally:
        os.close(descriptor)
    if len(data) < _PREFIX.size:
        raise InputError("cut off")
    magic, size, checksum = _PREFIX.unpack(data[: _PREFIX.size])
    if magic != _MAGIC:
        raise InputError("it is not a history of this version of Treering")
    start = _PREFIX.size + size
    header = data[_PREFIX.size : start]
    if zlib.crc32(header) != checksum:
        raise InputError("cut off or damaged in its header")
    content = json.loads(header)
    prompts = {}
    for entry in content["prompts"]:
        prompts[entry[0]] = StoredIndex(data, start, file, entry)
        start += 8 * entry[2][-1]
    return HistoryFile(content["whole"], content["removed"], prompts)


def read_file(file: Path) -> HistoryFile | None:
    """Map a file like `map_file`; return None for a missing file, or with a warning for a damaged one."""
    try:
        return map_file(file)
    except FileNotFoundError:
        return None
    except (OSError, InputError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        warnings.warn(
            f"{file} is dropped: {reason}; its rollouts are lost, which costs speed only; remove it to end this "
            "warning",
            stacklevel=3,
        )
        return None


class ListedFile(NamedTuple):
    """A data file as a folder lists it.

    A folder that is created again reuses numbers; the other fields tell files apart.
    """

    number: int
    path: Path
    inode: int
    modified_ns: int
    num_bytes: int


def path_of(folder: Path, number: int) -> Path:
    """Return the path of the file with this number."""
    return folder / f"history-{number:08d}.bin"


def list_files(folder: Path) -> list[ListedFile]:
    """Return the data files of a folder by number; empty for a missing folder."""
    found = []
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            name = _NAME.fullmatch(entry.name)
            if name is not None:
                with suppress(FileNotFoundError):
                    status, path = entry.stat(), folder / entry.name
                    found.append(ListedFile(int(name[1]), path, status.st_ino, status.st_mtime_ns, status.st_size))
    return sorted(found)


def replay(files: Iterable[HistoryFile]) -> dict[PromptId, StoredIndex]:
    """Return the state after files in the order of their numbers, prompts in the order in which they were added.

    Example: files with {a, b}, then {c}, then `removed` [a] and {b} give b (of the last file), c.
    """
    state: dict[PromptId, StoredIndex] = {}
    for file in files:
        if file.is_whole:
            state = {}
        for prompt_id in file.removed:
            state.pop(prompt_id, None)
        state.update(file.prompts)
    return state
