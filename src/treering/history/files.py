"""Files of history: rollouts by prompt and version behind a checksum, appearing whole or not at all.

Knows bytes. Knows nothing of budgets and indexes. A file is read only when every byte of it is as it was written.

    16 bytes    magic, format version (uint32) and length of the header (uint32), little-endian
    header      JSON: {"num_pending": int, "blocks": [[prompt_id, version, entries of its text], ...]}
    payload     the texts one after another, little-endian int32
    32 bytes    BLAKE2b of everything above
"""

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from treering.errors import InputError
from treering.history.index import MARKER, Int32Array
from treering.types import PromptId

MAGIC = b"RINGHIST"
FORMAT_VERSION = 1
_PREFIX = struct.Struct("<8sII")
_DIGEST_BYTES = 32
_HIDDEN = ".unfinished-"

BlockKey: TypeAlias = tuple[PromptId, int]
"""(prompt_id, version)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """What a file holds, in order: published rollouts, and those that were added but not yet published."""

    published: Mapping[BlockKey, Int32Array]
    pending: Mapping[BlockKey, Int32Array]


def encode(contents: Contents) -> bytes:
    """The bytes of a file.

    Example: prompt "q" with [5, 6] at version 3 gives the header {"num_pending": 0, "blocks": [["q", 3, 3]]} and the
    payload -1, 5, 6.
    """
    blocks = [*contents.published.items(), *contents.pending.items()]
    header = json.dumps(
        {
            "num_pending": len(contents.pending),
            "blocks": [[prompt_id, version, int(text.size)] for (prompt_id, version), text in blocks],
        }
    ).encode()
    prefix = _PREFIX.pack(MAGIC, FORMAT_VERSION, len(header))
    body = b"".join([prefix, header, *(text.astype("<i4").tobytes() for _, text in blocks)])
    return body + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def decode(data: bytes) -> Contents:
    """What `encode` was given.

    Raises:
        InputError: other bytes, with the reason in a few words.
    """
    if not data.startswith(MAGIC):
        raise InputError("no history file")
    if len(data) < _PREFIX.size + _DIGEST_BYTES:
        raise InputError("cut off")
    _, format_version, header_size = _PREFIX.unpack_from(data)
    if format_version != FORMAT_VERSION:
        raise InputError(f"of format {format_version}, and this Treering reads format {FORMAT_VERSION}")
    body, digest = memoryview(data)[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != digest:
        raise InputError("damaged: its checksum differs")
    header = json.loads(bytes(body[_PREFIX.size : _PREFIX.size + header_size]))
    entries = np.frombuffer(body[_PREFIX.size + header_size :], "<i4").astype(np.int32)
    return _split(header["blocks"], header["num_pending"], entries)


def _split(blocks: Sequence[tuple[PromptId, int, int]], num_pending: int, entries: Int32Array) -> Contents:
    ends = np.cumsum([0, *(size for _, _, size in blocks)])
    # The checksum held, so anything else is a bug of the writer.
    assert ends[-1] == entries.size
    assert (entries[ends[:-1]] == MARKER).all()
    texts = [
        ((prompt_id, version), entries[a:b])
        for (prompt_id, version, _), a, b in zip(blocks, ends[:-1], ends[1:], strict=True)
    ]
    num_published = len(texts) - num_pending
    return Contents(published=dict(texts[:num_published]), pending=dict(texts[num_published:]))


def write_whole(file: Path, data: bytes) -> None:
    """Writes a file that appears with all its bytes, or not at all when the process is killed.

    Raises:
        OSError: the folder is missing, read-only or full; nothing has appeared then.
    """
    draft = file.with_name(f"{_HIDDEN}{file.name}")
    with draft.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(draft, file)
    _flush(file.parent)


def clear_unfinished(folder: Path) -> None:
    """Removes what killed writers left; no other process may be writing there."""
    for leftover in folder.glob(f"{_HIDDEN}*"):
        leftover.unlink()


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
