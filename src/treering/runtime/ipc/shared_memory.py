"""Shared memory in an unnamed file, passed to children as a file descriptor.

A named file in /dev/shm would remain after a killed run, and containers often limit that folder to 64 MB. An unnamed
file is freed when the last process that has it open ends, in whatever way.
"""

import mmap
import os
import tempfile
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from treering.errors import StateError

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of this container, in versions 2 and 1 of control groups."""


class SharedMemory:
    """Bytes that this process and its children read and write, initially zero.

    It can be pickled only as an argument of a new process.

    Example: `SharedMemory(64).view[:2] = b"ab"` is read as b"ab" by a child that got the object.
    """

    def __init__(self, num_bytes: int) -> None:
        """Reserves `num_bytes`, at least 1; pages are allocated at their first write.

        Raises:
            StateError: there is less free memory than that.
        """
        _check_room(num_bytes)
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


def _check_room(num_bytes: int) -> None:
    """Refuses what would end a process with a bus error, or another program, once its pages are written."""
    is_file = not hasattr(os, "memfd_create")
    free = _free_on_disk(tempfile.gettempdir()) if is_file else _free_memory()
    if free is not None and num_bytes > free:
        where = f"on {tempfile.gettempdir()}" if is_file else "of memory"
        raise StateError(
            f"workers share rl.staleness + 3 copies of the weights, {num_bytes:,} bytes, and {free:,} bytes {where} "
            "are free; free some, lower rl.staleness, or train without workers"
        )


def _free_on_disk(folder: str) -> int:
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def _free_memory() -> int | None:
    """Bytes that can be allocated without ending a program; None if the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        free = 1024 * (kilobytes["MemAvailable"] + kilobytes["SwapFree"])
    except (OSError, ValueError, LookupError):
        return None
    limits = [file.read_text(encoding="ascii").strip() for file in _LIMITS if file.is_file()]
    return min([free, *(int(limit) for limit in limits if limit.isdigit())])


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("treering-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
