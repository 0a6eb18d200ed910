"""What a process may write and read: errors of a disk as one line, and no waiting at a pipe that stands for a file.

This module imports no torch.
"""

import errno
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treering.errors import StateError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says where a disk or a quota is full."""

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP)


@contextmanager
def writing(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turns what the system says when the block writes `path` into one line that says what to do.

    Args:
        path: what the block writes.
        num_bytes: how much it writes; None if little.

    Raises:
        StateError: instead of an OSError.

    Example: on a full disk `with writing(Path("run/metrics.jsonl"), 200): ...` raises "run/metrics.jsonl cannot be
    written (No space left on device): 200 bytes are needed and 0 are free; free space there, and start again".
    """
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{path} cannot be written ({error.strerror or error}): {_advice(path, error, num_bytes)}"
        ) from error


def check_regular(path: Path) -> None:
    """Refuses a folder, a pipe or a device where a file belongs; opening a pipe would wait for ever.

    Raises:
        StateError: something else than a file, or a link to one, has that name.
        OSError: the folder of the file cannot be read.

    Example: `check_regular(Path("run.json"))` passes if there is no `run.json`.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "pipe or device"
        raise StateError(f"{path} belongs to a file, and a {kind} has that name; move it away, and start again")


def allocate(file: Path, num_bytes: int) -> None:
    """Makes room for a file, or raises what the system says; libraries in other languages hide it.

    Raises:
        OSError: the disk is full, or a quota or limit is reached.

    Example: `allocate(Path("state.pt"), 1 << 30)` on a small disk raises ENOSPC and leaves no file.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    finally:
        os.close(descriptor)
        file.unlink()


def _advice(path: Path, error: OSError, num_bytes: int | None) -> str:
    needed = "a few thousand bytes are needed" if num_bytes is None else f"{num_bytes:,} bytes are needed"
    if error.errno in FULL:
        return f"{needed} and {_num_free(path):,} are free; free space or raise the quota there, and start again"
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return f"{needed} and files are limited to {limit:,} (ulimit -f); raise the limit, and start again"
    if error.errno in _FORBIDDEN:
        return "a folder that can be written is needed; change its permissions or its mount, or choose another"
    if error.errno in _IN_THE_WAY:
        return f"something else has the name {error.filename or path}; move it away, and start again"
    return f"{needed}; check the disk, and start again"


def _num_free(path: Path) -> int:
    """Free bytes of the disk that has the path, or that its nearest existing folder is on."""
    place = next((each for each in (path, *path.absolute().parents) if each.exists()), Path("/"))
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize
