"""Ends vLLM's processes with the one that started them, also where that one is killed: by themselves they live on."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

_WATCH = """
import os, signal, sys
sys.stdin.buffer.read()
for pid, start in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        with open(f"/proc/{pid}/stat") as file:
            found = file.read().rsplit(")", 1)[1].split()[19]
        if found == start:
            os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
"""
"""Reads until the pipe's other end is gone, then kills each process that is still the one that it was."""


def end_with_this_process(pids: Iterable[int]) -> subprocess.Popen[bytes] | None:
    """Starts a small process that kills these when this process has ended, however it did; keep the result.

    Does nothing where there is no /proc, and for processes that have ended.

    Example: after SIGKILL to this process, a child that would have lived on is gone too.
    """
    identities = [(str(pid), start) for pid in pids if (start := _start_of(pid)) is not None]
    if not identities:
        return None
    arguments = [part for identity in identities for part in identity]
    return subprocess.Popen(
        [sys.executable, "-S", "-c", _WATCH, *arguments], stdin=subprocess.PIPE, start_new_session=True
    )


def _start_of(pid: int) -> str | None:
    """When a process started, in the kernel's ticks: with its number this identifies it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return None
