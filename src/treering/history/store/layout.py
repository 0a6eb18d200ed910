"""The layout of a block's arrays in a file: one after another, each at a multiple of 64 bytes, under one checksum.

Everything is little-endian, so that a process uses the arrays in place.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from mmap import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError
from treering.history.store.files import Buffer
from treering.history.store.prompt_index import PromptIndex

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
