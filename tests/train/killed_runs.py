"""Runs that die by SIGKILL, for the tests of law 8; a program of its own, because what it trains in must be killed.

Called as `python -m tests.train.killed_runs FOLDER`. Every run is a forked process, so that torch is imported once. A
run dies at its n-th file operation, counted by an audit hook: before it opens, makes, renames or removes anything.
"""

import hashlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from tests.train.runs import store, tensors_of, tiny_loop
from treering.metrics import JsonlSink, Metrics
from treering.train.run import CHECKPOINTS_FOLDER, METRICS_FILE, open_run, run_steps

NUM_STEPS = 5
SAVE_EVERY = 2
NUM_MOMENTS = 17
_FILE_EVENTS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"})


class FileOperations:
    """Counts the file operations below a folder, and kills this process at the n-th."""

    def __init__(self, folder: Path, kill_at: int | None) -> None:
        self.count = 0
        self._folder = f"{folder}{os.sep}"
        self._kill_at = kill_at
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[object, ...]) -> None:
        if event not in _FILE_EVENTS or not str(arguments[0]).startswith(self._folder):
            return
        self.count += 1
        if self.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def run(folder: Path, kill_at: int | None) -> None:
    """Trains `NUM_STEPS` steps in `folder`, resuming what is there; leaves `done.json` beside it at the end."""
    operations = FileOperations(folder, kill_at)
    loop = tiny_loop()
    checkpoints = store(folder / CHECKPOINTS_FOLDER)
    opened = open_run(folder, loop, checkpoints)
    with Metrics([JsonlSink(folder / METRICS_FILE, resume_step=opened.resume_step)]) as metrics:
        list(run_steps(loop, num_steps=NUM_STEPS, save_every=SAVE_EVERY, checkpoints=checkpoints, metrics=metrics))
    total = hashlib.sha256()
    for name, tensor in sorted(tensors_of(loop).items()):
        total.update(name.encode() + tensor.numpy().tobytes())
    done = {"digest": total.hexdigest(), "num_operations": operations.count}
    folder.with_suffix(".json").write_text(json.dumps(done))


def in_a_process(folder: Path, kill_at: int | None) -> bool:
    """Whether the run came to its end; False if it was killed."""
    child = os.fork()
    if child == 0:
        try:
            run(folder, kill_at)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status == 0


def report(folder: Path, num_kills: int) -> dict[str, object]:
    """What a finished run left."""
    rows = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    done = json.loads(folder.with_suffix(".json").read_text())
    steps, losses = [row["step"] for row in rows], [row["train/loss"] for row in rows]
    left = sorted(path.name for path in (folder / CHECKPOINTS_FOLDER).iterdir())
    return {**done, "steps": steps, "losses": losses, "num_kills": num_kills, "checkpoints": left}


def main(folder: Path) -> list[dict[str, object]]:
    """One run without a kill, one killed at each of many moments, and one killed again and again."""
    assert in_a_process(folder / "whole", None)
    reports = [report(folder / "whole", 0)]
    last = int(str(reports[0]["num_operations"]))
    for moment in sorted({1 + round(i * (last - 1) / (NUM_MOMENTS - 1)) for i in range(NUM_MOMENTS)}):
        name = folder / f"killed-{moment}"
        assert not in_a_process(name, moment)
        assert in_a_process(name, None)
        reports.append(report(name, 1))
    kills = 0
    while not in_a_process(folder / "often", last // 2):
        kills += 1
    reports.append(report(folder / "often", kills))
    return reports


if __name__ == "__main__":
    warnings.simplefilter("error")
    # One thread: a forked process has no other, and torch adds up in another order with more.
    torch.set_num_threads(1)
    disable_progress_bar()
    print(json.dumps(main(Path(sys.argv[1]))))
