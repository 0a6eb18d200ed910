"""A controller for tests to kill: it trains into a folder on its own Ray, prints its actors' pids, and waits."""

import sys
import threading
from pathlib import Path

from tests.runtime.runs import pipeline
from tests.runtime.test_resume import train
from treering.runtime.ray_actors import RayActors

if __name__ == "__main__":
    loop = pipeline(num_steps=6, staleness=1, actors=RayActors(num_rollout_workers=2))
    train(loop, Path(sys.argv[1]), stop_after=2)
    print(*loop.pids.values(), flush=True)
    threading.Event().wait()
