"""History files as bytes: a sealed header, with or without arrays after it, written whole or not at all.

16 bytes    magic (8), format version (uint32) and length of the header (uint32), little-endian
32 bytes    BLAKE2b of these 16 bytes and the header
header      JSON
"""

import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from treering.errors import InputError
from treering.files.atomic import draft_path

FORMAT_VERSION = 3
_PREFIX = struct.Struct("<8sII")
_DIGEST_BYTES = 32

Buffer: TypeAlias = Any
"""Anything whose bytes can be read: bytes, a map of a file, an array."""


def seal(magic: bytes, header: dict[str, Any]) -> tuple[bytes, str]:
    """The bytes of a sealed header, and its digest in hexadecimal digits.

    Example: {"next": 3} takes 16 + 32 + 10 bytes.
    """
    body = json.dumps(header, separators=(",", ":")).encode()
    prefix = _PREFIX.pack(magic, FORMAT_VERSION, len(body))
    digest = _digest(prefix, body)
    return prefix + digest + body, digest.hex()


def unseal(magic: bytes, data: Buffer) -> tuple[dict[str, Any], str, int]:
    """The header passed to `seal`, its digest, and its sealed size in bytes.

    Raises:
        InputError: the bytes do not begin with such a header, with a short reason.
    """
    if data[: len(magic)] != magic:
        raise InputError("cut off" if len(data) < len(magic) else "no file of a history")
    if len(data) < _PREFIX.size + _DIGEST_BYTES:
        raise InputError("cut off")
    prefix, digest = bytes(data[: _PREFIX.size]), bytes(data[_PREFIX.size : _PREFIX.size + _DIGEST_BYTES])
    _, format_version, size = _PREFIX.unpack(prefix)
    if format_version != FORMAT_VERSION:
        raise InputError(
            f"of format {format_version}, and this Treering reads format {FORMAT_VERSION}, which holds ready indexes"
        )
    end = _PREFIX.size + _DIGEST_BYTES + size
    if end > len(data):
        raise InputError("cut off or damaged in its header")
    body = bytes(data[_PREFIX.size + _DIGEST_BYTES : end])
    if _digest(prefix, body) != digest:
        raise InputError("damaged in its header: the checksum differs")
    header: dict[str, Any] = json.loads(body)
    return header, digest.hex(), end


def open_file(file: Path) -> BinaryIO:
    """Opens a file to read; a pipe in its place is refused at once, and not waited for.

    Raises:
        OSError: the file is missing or cannot be read.
        InputError: something else has its name.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError("a folder, a pipe or a device has its name")
    return os.fdopen(descriptor, "rb")


def read_file(file: Path) -> bytes:
    """The bytes of a file.

    Raises:
        OSError, InputError: see `open_file`.
    """
    with open_file(file) as stream:
        return stream.read()


def write_whole(file: Path, parts: Iterable[Buffer]) -> None:
    """Writes a file atomically: it appears with all its bytes or not at all, even if the process is killed.

    Raises:
        OSError: the folder is missing, read-only or full; no file appears.
    """
    draft = draft_path(file)
    try:
        with draft.open("wb") as stream:
            stream.writelines(parts)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(draft, file)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def flush_folder(folder: Path) -> None:
    """Flushes a folder's entries to disk, so that they survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(prefix: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(prefix + body, digest_size=_DIGEST_BYTES).digest()
