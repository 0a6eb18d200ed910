"""A lock on a folder, so that one process at a time writes it.

The kernel releases the lock when its process dies.
"""

import fcntl
import os
import weakref
from pathlib import Path

from treering.errors import StateError

_NAME = ".lock"


class WriterLock:
    """Holds the lock until `release`, or until it is garbage-collected.

    Example: while `WriterLock(folder)` is held, another `WriterLock(folder)` is refused in this and any other process.
    """

    def __init__(self, folder: Path) -> None:
        """Takes the lock.

        Raises:
            StateError: it is already held.
            OSError: the folder is missing or cannot be written.
        """
        self._folder = folder
        self._process = os.getpid()
        descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise StateError(
                f"one HistoryStore at a time writes a folder, and {folder} is open in one already; close it, give "
                "another path, or read it with HistoryReader, of which there may be any number"
            ) from None
        except OSError:
            os.close(descriptor)
            raise
        self._close = weakref.finalize(self, os.close, descriptor)
        # A forked process shares the lock; its copy would hold it after the writer has died.
        os.register_at_fork(after_in_child=self._close)

    def check(self) -> None:
        """Checks that this process holds the lock.

        Raises:
            StateError: it was released, or this process was forked from the one that took it.
        """
        if os.getpid() != self._process:
            raise StateError(
                f"the history in {self._folder} is written by process {self._process}, and this is process "
                f"{os.getpid()}, forked from it; publish there, and read here with HistoryReader"
            )
        if not self._close.alive:
            raise StateError(f"the history in {self._folder} is closed; open it again with HistoryStore")

    def release(self) -> None:
        """Releases the lock."""
        self._close()
