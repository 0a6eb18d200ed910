"""A controller for tests to kill: `python -m tests.runtime.controller` prints its children's pids, and waits."""

import threading

from tests.runtime.runs import pipeline

if __name__ == "__main__":
    loop = pipeline(num_steps=3, staleness=1)
    loop.step()
    print(*loop.pids.values(), flush=True)
    threading.Event().wait()
