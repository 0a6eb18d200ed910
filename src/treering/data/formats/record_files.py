"""Bytes of trajectory files: reading and writing of plain and compressed lines. Every error begins with the file."""

import codecs
import gzip
import io
import json
import os
import stat
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from treering.data.formats.codec import encode
from treering.data.trajectory import Trajectory
from treering.errors import DataWarning, InputError
from treering.extras import require

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""First bytes of compressed files."""


class ReadPosition:
    """Count of the stored bytes that readers have read from a file or folder."""

    def __init__(self) -> None:
        self.num_read = 0
        """Number of bytes."""


class _CountedFile(io.FileIO):
    def __init__(self, file: Path, position: ReadPosition) -> None:
        super().__init__(file, "rb")
        self._position = position

    def readinto(self, buffer: Any) -> int:
        num_bytes = super().readinto(buffer) or 0
        self._position.num_read += num_bytes
        return num_bytes


_PART_BYTES = 1 << 16


def write_trajectories(path: str | os.PathLike[str], trajectories: Iterable[Trajectory]) -> None:
    """Write a file for `read_trajectories`; compress it if its name ends in .gz.

    The write is atomic: an error or a kill leaves the old file.

    Example: `write_trajectories("set.jsonl", [Trajectory(task_id=1, tokens=np.array([5, 6], np.int32))])` writes
    `{"task_id": 1, "format": "chat", "tokens": [5, 6]}`.
    """
    write_lines(Path(path), (_line(trajectory) for trajectory in trajectories))


def write_lines(file: Path, lines: Iterable[bytes]) -> None:
    """Write or replace a file of lines atomically; compress it if its name ends in .gz."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            if file.suffix == ".gz":
                # With a fixed time stamp, equal trajectories have equal bytes.
                with gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) as compressed:
                    compressed.writelines(lines)
            else:
                stream.writelines(lines)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except OSError as error:
        raise InputError(f"{file}: cannot be written ({error.strerror}); check folder and free space") from error
    finally:
        temporary.unlink(missing_ok=True)


def append_trajectories(path: str | os.PathLike[str], trajectories: Iterable[Trajectory]) -> None:
    """Append lines to a plain file; create the file and its folder if needed.

    Once it returns, a killed process does not lose the lines; a kill during the call may leave a partial last line.

    Example: two calls with one trajectory each leave a file of two lines.
    """
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "ab") as stream:
            stream.writelines(_line(trajectory) for trajectory in trajectories)
    except OSError as error:
        raise InputError(f"{file}: cannot be written ({error.strerror}); check folder and free space") from error


def _line(trajectory: Trajectory) -> bytes:
    return json.dumps(encode(trajectory), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def numbered_lines(file: Path, position: ReadPosition | None = None) -> Iterator[tuple[int, bytes]]:
    r"""Yield the lines of a file with their numbers from 1; blank lines are counted but not yielded.

    Gzip is detected from the content, and a byte order mark of UTF-8 is dropped.

    Raises:
        InputError: the file cannot be read, is not a regular file, or is a damaged gzip file.

    Example: a file with the lines "a", "" and "b" yields (1, b"a\n") and (3, b"b\n").
    """
    with _reading(file), _open_file(file, position) as stream:
        for number, line in enumerate(stream, start=1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if content.strip():
                yield number, content


def whole_lines(file: Path, position: ReadPosition | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that a run writes, with their numbers from 1, without a torn last line.

    A last line is torn if it has no line break and is not JSON, because the run was killed while it wrote. The line is
    skipped; a run that resumes writes it again.

    Raises:
        InputError: the file cannot be read.

    Warns:
        DataWarning: the last line is torn.

    Example: of the lines `{"step": 1}` and `{"st`, the second without a line break, only the first is yielded.
    """
    for number, line in numbered_lines(file, position):
        if not line.endswith(b"\n") and not is_json(line):
            torn = f"{file}:{number}: the last line is torn, as by a kill while it was written, and is left out"
            warnings.warn(torn, DataWarning, stacklevel=2)
            return
        yield number, line


def is_json(text: bytes) -> bool:
    """Return whether bytes are a whole JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def content_parts(file: Path, position: ReadPosition | None = None) -> Iterator[bytes]:
    """Yield the content of a file in parts, decompressed, without a byte order mark."""
    with _reading(file), _open_file(file, position) as stream:
        part = stream.read(_PART_BYTES).removeprefix(codecs.BOM_UTF8)
        while part:
            yield part
            part = stream.read(_PART_BYTES)


def first_bytes(file: Path, count: int) -> bytes:
    """Return the first stored bytes of a regular file, at most `count`."""
    with _reading(file):
        # Opening a pipe would wait for its writer.
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise InputError(f"{file}: only regular files are read, and this is a folder, pipe or device; name a file")
        with open(file, "rb") as stream:
            return stream.read(count)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn errors of the block into InputErrors that name the file."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{file}: not a whole gzip file ({error}); fetch or compress it again") from error
    except OSError as error:
        # Errors without a number are a library's, not the system's.
        fix = "fetch or compress it again" if error.errno is None else "check the path"
        raise InputError(f"{file}: cannot be read ({error.strerror or error}); {fix}") from error


def _open_file(file: Path, position: ReadPosition | None = None) -> BinaryIO:
    """Open a file; decompress it if its content is zstandard, or its content or name is gzip."""
    head = first_bytes(file, len(_ZSTD))
    stored: Any = io.BufferedReader(_CountedFile(file, position or ReadPosition()), 1 << 16)
    if head == _ZSTD:
        require(f"{file.name}, compressed by zstandard,", "pyarrow")
        import pyarrow

        return cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(stored, "zstd"), 1 << 16))
    if not head.startswith(_GZIP) and file.suffix != ".gz":
        return cast(BinaryIO, stored)
    stream: Any = gzip.GzipFile(fileobj=stored, mode="rb")
    # `GzipFile.close` closes this stream.
    stream.myfileobj = stored
    return cast(BinaryIO, stream)
