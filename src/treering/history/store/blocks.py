"""Data files: the indexes of prompts, each a block with its own checksum.

A block is checked when it is first used, so opening a large history costs only the prompts that are read.

    header      number of the file; for each index its prompt, place, versions, entries, rollouts and checksum
    blocks      from the next multiple of 64 bytes: text, order, versions, starts of each index
"""

import hashlib
import os
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError
from treering.history.store.files import Buffer, open_file, seal, unseal
from treering.history.store.prompt_index import PromptIndex
from treering.types import PromptId

ALIGNMENT = 64
INDEX_ARRAYS = tuple(field.name for field in fields(PromptIndex))
_OTHER_DTYPES = {"versions": "<i8", "starts": "<i8"}
_ITEM_BYTES = {name: np.dtype(dtype).itemsize for name, dtype in _OTHER_DTYPES.items()}
_DIGEST_BYTES = 16

Arrays = dict[str, NDArray[Any]]


def padded(num_bytes: int) -> int:
    """The next multiple of 64.

    Example: 65 gives 128.
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def index_sizes(num_entries: int, num_versions: int) -> dict[str, int]:
    """Entries of each array of an index.

    Example: one rollout of two tokens has 3 entries of text, one version and two starts.
    """
    others = {"versions": num_versions, "starts": num_versions + 1}
    return {name: others.get(name, num_entries) for name in INDEX_ARRAYS}


def num_bytes_of(sizes: Mapping[str, int]) -> int:
    """Bytes of arrays in memory."""
    return sum(_num_bytes(name, size) for name, size in sizes.items())


def num_bytes_in_file(sizes: Mapping[str, int]) -> int:
    """Bytes of arrays in a file, padding included."""
    return sum(padded(_num_bytes(name, size)) for name, size in sizes.items())


def empty(sizes: Mapping[str, int]) -> Arrays:
    """Arrays of zeros."""
    return {name: np.zeros(size, _dtype(name)) for name, size in sizes.items()}


def parts_of(arrays: Mapping[str, NDArray[Any]]) -> list[Buffer]:
    """The bytes of named arrays as stored in a file, in parts; large arrays are not copied."""
    parts: list[Buffer] = []
    for name, values in arrays.items():
        array = np.ascontiguousarray(values, _dtype(name))
        parts += [array.view(np.uint8), bytes(padded(array.nbytes) - array.nbytes)]
    return parts


def checksum_of(parts: Iterable[Buffer]) -> str:
    """BLAKE2b of the bytes of parts, 32 hexadecimal digits."""
    checksum = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        checksum.update(part)
    return checksum.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """The location of a block's arrays.

    Attributes:
        source: a map of a file, or its bytes.
        start: of the block in the source, in bytes.
        sizes: entries of each array, in the order of the file.
        checksum: of the block.
    """

    source: Buffer
    start: int
    sizes: Mapping[str, int]
    checksum: str

    def arrays(self) -> Arrays:
        """The arrays, as read-only views.

        Raises:
            InputError: the block is damaged, with a short reason.
        """
        end = self.start + num_bytes_in_file(self.sizes)
        # A map keeps its original size; reading past the end of a file that was truncated since kills the process.
        num_there = self.source.size() if isinstance(self.source, mmap) else len(self.source)
        if end > min(num_there, len(self.source)):
            raise InputError("cut off")
        if checksum_of([memoryview(self.source)[self.start : end]]) != self.checksum:
            raise InputError("damaged: the checksum differs")
        found, start = {}, self.start
        for name, size in self.sizes.items():
            array = np.frombuffer(self.source, _dtype(name), size, start)
            # A copy only where the machine is not little-endian.
            found[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
            start += padded(_num_bytes(name, size))
        return found


def _dtype(name: str) -> str:
    return _OTHER_DTYPES.get(name, "<i4")


def _num_bytes(name: str, size: int) -> int:
    return _ITEM_BYTES.get(name, 4) * size


MAGIC = b"RINGHIST"


class Block:
    """One prompt's index in a file; read and checked on first use.

    Attributes:
        prompt_id: of the prompt.
        place: of the prompt in the order of the store, see `Snapshot.place`.
        versions: of its rollouts, newest first.
        num_tokens: of its rollouts.
        num_bytes: of its arrays, equal to `PromptIndex.num_bytes`.

    Example: a prompt with [5, 6] at version 3 has versions (3,), 2 tokens, and 3 * 8 + 24 = 48 bytes, which take
    4 * 64 in the file.
    """

    __slots__ = ("_file", "_index", "_lock", "_region", "num_bytes", "num_tokens", "place", "prompt_id", "versions")

    def __init__(
        self, *, prompt_id: PromptId, place: int, versions: Sequence[int], num_rollouts: int, file: Path, region: Region
    ) -> None:
        self.prompt_id = prompt_id
        self.place = place
        self.versions = tuple(versions)
        self.num_tokens = region.sizes["text"] - num_rollouts
        self.num_bytes = num_bytes_of(region.sizes)
        self._file = file
        self._region = region
        self._index: PromptIndex | None = None
        self._lock = threading.Lock()

    @property
    def index(self) -> PromptIndex:
        """The index, in the file's memory; a damaged one is replaced by an empty one, with a warning (law 7)."""
        if self._index is None:
            with self._lock:
                if self._index is None:
                    self._index = self._read()
        return self._index

    def copied(self) -> PromptIndex:
        """A copy of the index, independent of the file."""
        index = self.index
        return PromptIndex(**{name: getattr(index, name).copy() for name in INDEX_ARRAYS})

    def _read(self) -> PromptIndex:
        try:
            return PromptIndex(**self._region.arrays())
        except InputError as error:
            warn_of_block(self._file, self.prompt_id, error)
            return PromptIndex(**empty(index_sizes(0, 0)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """What a data file holds.

    Attributes:
        number: of the file, in the order of writing.
        digest: of its header, and so of all its checksums.
        blocks: the indexes.
    """

    number: int
    digest: str
    blocks: Sequence[Block]


def encode(number: int, indexes: Iterable[tuple[PromptId, int, PromptIndex]]) -> tuple[list[Buffer], str]:
    """The bytes of a data file, in parts, and the digest of its header.

    Args:
        number: of the file.
        indexes: prompt_id, place and index each.
    """
    arrays: list[Buffer] = []
    blocks: list[list[object]] = []
    for prompt_id, place, index in indexes:
        parts = parts_of({name: getattr(index, name) for name in INDEX_ARRAYS})
        sizes = [index.text.size, index.text.size - index.num_tokens]
        blocks.append([prompt_id, place, index.versions.tolist(), *sizes, checksum_of(parts)])
        arrays += parts
    header, digest = seal(MAGIC, {"number": number, "blocks": blocks})
    return [header, bytes(padded(len(header)) - len(header)), *arrays], digest


def decode(data: Buffer, file: Path) -> Contents:
    """The inverse of `encode`; the indexes are not copied, and not read yet.

    Args:
        data: bytes, or a map of a file.
        file: its path, for messages.

    Raises:
        InputError: the header is damaged, with a short reason.
    """
    header, digest, end = unseal(MAGIC, data)
    start = padded(end)
    blocks: list[Block] = []
    for prompt_id, place, versions, num_entries, num_rollouts, checksum in header["blocks"]:
        sizes = index_sizes(num_entries, len(versions))
        region = Region(source=data, start=start, sizes=sizes, checksum=checksum)
        start += num_bytes_in_file(sizes)
        block = Block(
            prompt_id=prompt_id, place=place, versions=versions, num_rollouts=num_rollouts, file=file, region=region
        )
        blocks.append(block)
    return Contents(number=header["number"], digest=digest, blocks=blocks)


def map_file(file: Path, number: int, digest: str | None) -> Contents:
    """The contents of a memory-mapped file; they stay valid after the file is removed.

    Args:
        file: to map.
        number: its expected number.
        digest: expected digest of its header; None accepts any.

    Raises:
        OSError: the file cannot be opened.
        InputError: its header is damaged, or it is another file than the expected one.
    """
    with open_file(file) as stream:
        if stream.seek(0, os.SEEK_END) == 0:
            raise InputError("cut off")
        contents = decode(mmap(stream.fileno(), 0, access=ACCESS_READ), file)
    if contents.number != number or digest not in (None, contents.digest):
        raise InputError("another file stands in its place")
    return contents


def warn_of_file(file: Path, error: OSError | InputError) -> None:
    """Warns that a whole file is lost (law 7)."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    try:
        size = f"the rollouts in its {file.stat().st_size:,} bytes are"
    except OSError:
        size = "its rollouts are"
    warnings.warn(
        f"{file} is left out: {reason}; {size} lost, which costs speed only; remove what is left of it to end this "
        "warning",
        stacklevel=3,
    )


def warn_of_block(file: Path, prompt_id: PromptId, error: InputError) -> None:
    """Warns that one block of a file is lost (law 7)."""
    warnings.warn(
        f"the rollouts of prompt {prompt_id!r} in {file} are left out: {error}; they are lost, which costs speed only",
        stacklevel=3,
    )
