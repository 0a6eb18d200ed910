"""Supervised runs that get killed; run as `python -m tests.train.loop.killed_runs FOLDER`."""

import hashlib
from pathlib import Path

from tests.killing import main
from tests.train.loop.runs import store, tensors_of, tiny_loop
from treering.files.writing import CHECKPOINTS_FOLDER
from treering.metrics import METRICS_FILE, JsonlSink, Metrics
from treering.train.loop.saved_run import open_run, run_steps

NUM_STEPS = 5
SAVE_EVERY = 2


def train(folder: Path) -> str:
    """Train `NUM_STEPS` steps in `folder`, resuming an earlier run."""
    loop = tiny_loop()
    checkpoints = store(folder / CHECKPOINTS_FOLDER)
    opened = open_run(folder, loop, checkpoints)
    with Metrics([JsonlSink(folder / METRICS_FILE, resume_step=opened.resume_step)]) as metrics:
        list(run_steps(loop, num_steps=NUM_STEPS, save_every=SAVE_EVERY, checkpoints=checkpoints, metrics=metrics))
    total = hashlib.sha256()
    for name, tensor in sorted(tensors_of(loop).items()):
        total.update(name.encode() + tensor.numpy().tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    main(train)
