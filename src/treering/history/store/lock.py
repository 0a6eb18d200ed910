"""A lock on a folder of history, so that one process at a time writes it."""

import os
from pathlib import Path

from treering.errors import StateError
from treering.file_lock import FileLock

_NAME = ".lock"


class WriterLock(FileLock):
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
        super().__init__(
            folder / _NAME,
            lambda holder: (
                f"one HistoryStore at a time writes a folder, and {folder} is open in one already ({holder}); close "
                "it, give another path, or read it with HistoryReader, of which there may be any number"
            ),
        )

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
        if not self.is_held:
            raise StateError(f"the history in {self._folder} is closed; open it again with HistoryStore")
