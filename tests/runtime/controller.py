"""A controller to be killed: `python -m tests.runtime.controller` says its children's process ids, and waits."""

import threading

from tests.runtime.runs import pipeline

if __name__ == "__main__":
    loop = pipeline(num_steps=3, staleness=1)
    loop.step()
    print(*loop.pids.values(), flush=True)
    threading.Event().wait()
