"""A lock on a file, which one process at a time holds.

The kernel releases the lock when the process ends, even by a kill, so a lock is never stale.
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
    """A lock that is held until `release`, or until the object is garbage-collected.

    Example: while `FileLock(file, refusal)` is held, a second one of the same file raises a StateError in every
    process, with the text `refusal("process 4711, which started it at 2026-03-01 10:20:30")`.
    """

    def __init__(self, file: Path, refusal: Callable[[str], str]) -> None:
        """Take the lock; the file is created and never removed.

        Args:
            file: the file, in which the holder writes its process id and the time.
            refusal: returns the text of the error for a description of the holder.

        Raises:
            StateError: the lock is held.
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
        # A forked process inherits the descriptor and would hold the lock after the holder ends.
        os.register_at_fork(after_in_child=self._close)

    @property
    def is_held(self) -> bool:
        """True until `release`."""
        return self._close.alive

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        self._close()


def _take(descriptor: int) -> None:
    # `is_locked` in another process holds the lock for an instant.
    for pause_s in _PAUSES_S:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(pause_s)
        else:
            return
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(file: Path) -> bool:
    """Return whether a process on this machine holds the lock; False if the file is missing or cannot be read.

    Example: False for the `run.lock` of a run that was killed.
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
        # This also releases the shared lock.
        os.close(descriptor)
    return False


def _holder(descriptor: int) -> str:
    # The holder may not have finished writing.
    process, _, since = os.pread(descriptor, 100, 0).decode(errors="replace").strip().partition(" ")
    return f"process {process}, which started it at {since}" if process.isdecimal() and since else "another process"
