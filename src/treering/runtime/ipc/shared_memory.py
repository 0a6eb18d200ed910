"""Shared memory in an unnamed file, passed to children as a file descriptor.

A named file in /dev/shm would remain after a killed run, and containers often limit that folder to 64 MB. An unnamed
file is freed when the last process that has it open ends, in whatever way.
"""

import mmap
import os
import tempfile
from multiprocessing import reduction
from typing import Any


class SharedMemory:
    """Bytes that this process and its children read and write, initially zero.

    It can be pickled only as an argument of a new process.

    Example: `SharedMemory(64).view[:2] = b"ab"` is read as b"ab" by a child that got the object.
    """

    def __init__(self, num_bytes: int) -> None:
        """Reserves `num_bytes`, at least 1; pages are allocated at their first write."""
        self._fd = _unnamed_file()
        os.ftruncate(self._fd, num_bytes)
        self.view = mmap.mmap(self._fd, num_bytes)

    def __getstate__(self) -> dict[str, Any]:
        return {"fd": reduction.DupFd(self._fd), "num_bytes": len(self.view)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._fd = state["fd"].detach()
        self.view = mmap.mmap(self._fd, state["num_bytes"])

    def close(self) -> None:
        """Closes the file; `view` stays readable while it is referenced."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("treering-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
