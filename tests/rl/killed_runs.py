"""RL runs with drafts for tests to kill: `python -m tests.rl.killed_runs FOLDER`."""

import hashlib
from pathlib import Path

from tests.killing import main
from tests.rl.runs import eager, memory_of, sampling_loop, steps_in
from tests.train.loop.runs import tensors_of

NUM_STEPS = 7
"""Two epochs of three steps, and one step of a third."""
SAVE_EVERY = 2


def train(folder: Path) -> str:
    """Train `NUM_STEPS` steps in `folder`, resuming an existing run."""
    memory = eager()
    loop = sampling_loop(drafting=memory)
    list(steps_in(folder, loop, NUM_STEPS, save_every=SAVE_EVERY))
    total = hashlib.sha256(repr((loop.version, sorted(loop.state()["draws"].items()))).encode())
    for name, tensor in sorted({**tensors_of(loop), **memory_of(memory)}.items()):
        total.update(name.encode() + tensor.numpy().tobytes())
    for file in sorted((folder / "rollouts").iterdir()):
        total.update(file.name.encode() + file.read_bytes())
    for file in sorted((folder / "history").iterdir()):
        total.update(file.name.encode())
    return total.hexdigest()


if __name__ == "__main__":
    main(train)
