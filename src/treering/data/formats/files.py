"""The bytes of trajectory files: lines, plain or gzipped, and their writing. Every error begins with the file."""

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

GZIP = b"\x1f\x8b"
"""The first bytes of a gzip file."""
ZSTD = b"\x28\xb5\x2f\xfd"
"""The first bytes of a zstandard file."""


class ReadPosition:
    """How many bytes of a file or folder, as they are stored, have been read; readers count while they read.

    Example: of a gzip file of 1,000 bytes that has been read to its end, `num_read` is 1,000.
    """

    def __init__(self) -> None:
        self.num_read = 0
        """Bytes."""


class _CountedFile(io.FileIO):
    """A file that counts what is read of it."""

    def __init__(self, file: Path, position: ReadPosition) -> None:
        super().__init__(file, "rb")
        self._position = position

    def readinto(self, buffer: Any) -> int:
        num_bytes = super().readinto(buffer) or 0
        self._position.num_read += num_bytes
        return num_bytes


_PART_BYTES = 1 << 16


def write_trajectories(path: str | os.PathLike[str], trajectories: Iterable[Trajectory]) -> None:
    """Writes a file for `read_trajectories`; a name that ends in .gz is compressed.

    The write is atomic: after an error or a kill the old file is still there.

    Example: `write_trajectories("set.jsonl", [Trajectory(task_id=1, tokens=np.array([5, 6], np.int32))])` writes
    `{"task_id": 1, "format": "chat", "tokens": [5, 6]}`.
    """
    write_lines(Path(path), (_line(trajectory) for trajectory in trajectories))


def write_lines(file: Path, lines: Iterable[bytes]) -> None:
    """Makes or replaces a file of lines, gzipped if its name ends in .gz; atomic.

    Raises:
        InputError: the file cannot be written.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            _write(stream, lines, file.suffix)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except OSError as error:
        raise InputError(f"{file}: cannot be written ({error.strerror}); check folder and free space") from error
    finally:
        temporary.unlink(missing_ok=True)


def append_trajectories(path: str | os.PathLike[str], trajectories: Iterable[Trajectory]) -> None:
    """Adds lines to a plain file; creates it and its folder if needed.

    Once it returns, a killed process does not lose them; a kill during the call may leave a partial last line.

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


def _write(stream: BinaryIO, lines: Iterable[bytes], suffix: str) -> None:
    if suffix != ".gz":
        stream.writelines(lines)
        return
    # With a fixed time stamp, equal trajectories give equal bytes.
    with gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) as compressed:
        compressed.writelines(lines)


def numbered_lines(file: Path, position: ReadPosition | None = None) -> Iterator[tuple[int, bytes]]:
    r"""The lines of a file with their numbers from 1; blank ones are skipped but counted.

    Gzip is read whatever the name is, and a byte order mark of UTF-8 is left out.

    Raises:
        InputError: the file cannot be read, is no regular file, or is not a whole gzip file.

    Example: a file with the lines "a", "" and "b" gives (1, b"a\n") and (3, b"b\n").
    """
    with _reading(file), open_file(file, position) as stream:
        for number, line in enumerate(stream, start=1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if content.strip():
                yield number, content


def whole_lines(file: Path, position: ReadPosition | None = None) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that a run writes itself, with their numbers from 1, without a torn last one.

    A last line is torn if it has no line break and is no JSON: the run was killed while it wrote. It is left out; a run
    that resumes writes it again.

    Raises:
        InputError: the file cannot be read.

    Warns:
        DataWarning: the last line is torn.

    Example: of the lines `{"step": 1}` and `{"st`, the second without a line break, only the first is given.
    """
    for number, line in numbered_lines(file, position):
        if not line.endswith(b"\n") and not is_json(line):
            torn = f"{file}:{number}: the last line is torn, as by a kill while it was written, and is left out"
            warnings.warn(torn, DataWarning, stacklevel=2)
            return
        yield number, line


def is_json(text: bytes) -> bool:
    """Whether bytes are a whole JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def content_parts(file: Path, position: ReadPosition | None = None) -> Iterator[bytes]:
    """The content of a file part by part, decompressed, without a byte order mark.

    The first part is not shorter than such a mark, unless the file is.

    Raises:
        InputError: as `numbered_lines`.
    """
    with _reading(file), open_file(file, position) as stream:
        part = stream.read(_PART_BYTES).removeprefix(codecs.BOM_UTF8)
        while part:
            yield part
            part = stream.read(_PART_BYTES)


def first_bytes(file: Path, count: int) -> bytes:
    """The first bytes of a regular file as they are stored, at most `count`.

    Raises:
        InputError: the file cannot be read or is no regular file.
    """
    with _reading(file):
        # Opening a pipe would wait for its writer, so the kind is checked first.
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise InputError(f"{file}: only regular files are read, and this is a folder, pipe or device; name a file")
        with open(file, "rb") as stream:
            return stream.read(count)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Names the file in what goes wrong with it."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{file}: not a whole gzip file ({error}); fetch or compress it again") from error
    except OSError as error:
        # What the system did not refuse, a library did.
        fix = "fetch or compress it again" if error.errno is None else "check the path"
        raise InputError(f"{file}: cannot be read ({error.strerror or error}); {fix}") from error


def open_file(file: Path, position: ReadPosition | None = None) -> BinaryIO:
    """The bytes of a file, decompressed if it is zstandard by its content, or gzip by its content or its name.

    Args:
        file: to open.
        position: counts the bytes that are read.

    Raises:
        InputError: the file cannot be read or is no regular file.
        MissingExtraError: it is zstandard, and pyarrow is missing.
    """
    head = first_bytes(file, len(ZSTD))
    stored: Any = io.BufferedReader(_CountedFile(file, position or ReadPosition()), 1 << 16)
    if head == ZSTD:
        return _zstd_stream(file, stored)
    if not head.startswith(GZIP) and file.suffix != ".gz":
        return cast(BinaryIO, stored)
    stream: Any = gzip.GzipFile(fileobj=stored, mode="rb")
    # It closes what this names.
    stream.myfileobj = stored
    return cast(BinaryIO, stream)


def _zstd_stream(file: Path, stored: BinaryIO) -> BinaryIO:
    require(f"{file.name}, compressed by zstandard,", "pyarrow")
    import pyarrow

    return cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(stored, "zstd"), 1 << 16))
