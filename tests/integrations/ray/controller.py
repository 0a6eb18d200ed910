"""A controller for tests to kill: trains into a folder on a Ray of its own, prints its actors' pids, and waits."""

import sys
import threading
from pathlib import Path

from tests.integrations.ray.conftest import make_launcher, start_ray
from tests.runtime.runs import pipeline
from tests.runtime.test_resume import train

if __name__ == "__main__":
    start_ray()
    loop = pipeline(num_steps=6, staleness=1, launcher=make_launcher())
    train(loop, Path(sys.argv[1]), stop_after=2)
    print(*loop.pids.values(), flush=True)
    threading.Event().wait()
