"""A lock on a file, so that one process at a time holds what it stands for.

The kernel releases the lock when its process dies, however it dies, so no lock is ever stale.
"""

import fcntl
import os
import time
import weakref
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from treering.errors import StateError

_PAUSES_S = (0.01, 0.05)


class FileLock:
    """Holds the lock until `release`, or until it is garbage-collected.

    Example: while `FileLock(file, refusal)` is held, another one of the same file is refused in this and any other
    process, with the text `refusal("process 4711, which started it at 2026-03-01 10:20:30")`.
    """

    def __init__(self, file: Path, refusal: Callable[[str], str]) -> None:
        """Takes the lock; the file is created, and stays.

        Args:
            file: names the holder, for people and for refusals.
            refusal: the text of the error, given who holds the lock.

        Raises:
            StateError: it is already held.
            OSError: the folder is missing or cannot be written, or its file system has no locks.
        """
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _take(descriptor)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()} {datetime.now().isoformat(' ', 'seconds')}\n".encode())
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise StateError(refusal(holder)) from None
        except OSError:
            os.close(descriptor)
            raise
        self._close = weakref.finalize(self, os.close, descriptor)
        # A forked process shares the lock; its copy would hold it after the holder has died.
        os.register_at_fork(after_in_child=self._close)

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._close.alive

    def release(self) -> None:
        """Releases the lock; a second call does nothing."""
        self._close()


def _take(descriptor: int) -> None:
    """Takes the lock, and tries again, as `is_locked` of another process has it for an instant.

    Raises:
        BlockingIOError: it is held.
    """
    for pause_s in _PAUSES_S:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(pause_s)
        else:
            return
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(file: Path) -> bool:
    """Whether some process of this machine holds the lock; False for a missing file, or one that cannot be read.

    Example: False for the `run.lock` of a run that has ended, however it ended.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        # Which also gives the shared lock back.
        os.close(descriptor)
    return False


def _holder(descriptor: int) -> str:
    """Who wrote itself into the file; it may be writing at this moment."""
    process, _, since = os.pread(descriptor, 100, 0).decode(errors="replace").strip().partition(" ")
    return f"process {process}, which started it at {since}" if process.isdecimal() and since else "another process"
