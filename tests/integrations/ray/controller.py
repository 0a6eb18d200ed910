"""A controller for tests to kill: trains into a folder on a Ray of its own, prints all processes' pids, and waits."""

import os
import sys
import threading
from pathlib import Path

from tests.integrations.ray.conftest import make_launcher, start_ray
from tests.runtime.runs import pipeline
from tests.runtime.test_resume import train


def processes_below(parent: int) -> list[int]:
    """The pids of all descendants of a process."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(stat[1])
    found = [parent]
    for pid in found:
        found += [child for child, its_parent in parents.items() if its_parent == pid]
    return found[1:]


if __name__ == "__main__":
    start_ray()
    loop = pipeline(num_steps=6, staleness=1, launcher=make_launcher())
    train(loop, Path(sys.argv[1]), stop_after=2)
    # Ray's own processes too: its raylet and the actors are below this one.
    print(*{*loop.pids.values(), *processes_below(os.getpid())}, flush=True)
    threading.Event().wait()
