"""The manifest of a folder: which blocks of which data files are the published state.

It is replaced whole, so a reader sees one published state. It pins every byte of that state: a file's digest covers the
checksums of its blocks.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treering.errors import InputError
from treering.history.store.files import read_file, seal, unseal

MAGIC = b"RINGLIST"
NAME = "manifest.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A data file of the published state.

    Attributes:
        number: of the file.
        digest: of its header.
        alive: a bit for each of its blocks, most significant first, 1 if it is alive.

    Example: with `bytes([0xA0])` blocks 0 and 2 are alive.
    """

    number: int
    digest: str
    alive: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A published state.

    Attributes:
        next_number: of the next data file, greater than all existing numbers.
        files: in the order of writing.
    """

    next_number: int
    files: Sequence[Listed]


def data_file(folder: Path, number: int) -> Path:
    """The path of a data file.

    Example: 7 gives `history-00000007.bin`.
    """
    return folder / f"history-{number:08d}.bin"


def read(file: Path) -> Manifest:
    """The manifest in a file.

    Raises:
        OSError: the file is missing or cannot be read.
        InputError: it is damaged.
    """
    return decode(read_file(file))


def warn(file: Path, error: OSError | InputError, consequence: str) -> None:
    """Warns that a manifest cannot be used (law 7), and of the consequence."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    warnings.warn(f"{file} cannot be used: {reason}; {consequence}", stacklevel=3)


def encode(manifest: Manifest) -> bytes:
    """The bytes of a manifest."""
    files = [[listed.number, listed.digest, listed.alive.hex()] for listed in manifest.files]
    return seal(MAGIC, {"next_number": manifest.next_number, "files": files})[0]


def decode(data: bytes) -> Manifest:
    """The inverse of `encode`.

    Raises:
        InputError: the bytes are damaged, with a short reason.
    """
    header, _, end = unseal(MAGIC, data)
    if end != len(data):
        raise InputError("damaged: there are bytes after its end")
    files = [
        Listed(number=number, digest=digest, alive=bytes.fromhex(alive)) for number, digest, alive in header["files"]
    ]
    return Manifest(next_number=header["next_number"], files=files)
