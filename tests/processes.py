import time
from collections.abc import Sequence
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that is dead but not yet reaped counts as dead."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_for_the_end_of(pids: Sequence[int], timeout_s: float = 300.0) -> None:
    """Wait until all these processes are dead, reaped or not."""
    end_s = time.monotonic() + timeout_s
    while any(map(is_alive, pids)):
        assert time.monotonic() < end_s, f"some of {pids} live on"
        time.sleep(0.01)
