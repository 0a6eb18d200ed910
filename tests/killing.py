"""Runs that die by SIGKILL, for the tests of law 8: the part that all kinds of training share.

Every run is a forked process, so that torch is imported only once. A run dies at its n-th file operation, counted by an
audit hook: before it opens, makes, renames or removes anything.
"""

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from treering.files.writing import CHECKPOINTS_FOLDER
from treering.metrics import METRICS_FILE

ROOT = Path(__file__).parents[1]
NUM_MOMENTS = 6
_FILE_EVENTS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"})

Train = Callable[[Path], str]
"""Train in a folder, resuming an existing run, and return a digest of everything that a further step depends on."""

Report = dict[str, Any]


class FileOperations:
    """Count the file operations below a folder, and kill this process at the n-th."""

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


def in_a_process(train: Train, folder: Path, kill_at: int | None) -> bool:
    """Return whether the run ended by itself, leaving `FOLDER.json` next to its folder; False if it was killed."""
    child = os.fork()
    if child == 0:
        try:
            operations = FileOperations(folder, kill_at)
            done = {"digest": train(folder), "num_operations": operations.count}
            folder.with_suffix(".json").write_text(json.dumps(done))
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status == 0


def report(folder: Path, num_kills: int) -> Report:
    rows = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    done = json.loads(folder.with_suffix(".json").read_text())
    steps, losses = [row["step"] for row in rows], [row["train/loss"] for row in rows]
    left = sorted(path.name for path in (folder / CHECKPOINTS_FOLDER).iterdir())
    return {**done, "steps": steps, "losses": losses, "num_kills": num_kills, "checkpoints": left}


def kill_and_resume(train: Train, folder: Path) -> list[Report]:
    """Make one run without a kill, one killed at each of many moments, and one killed again and again."""
    assert in_a_process(train, folder / "whole", None)
    reports = [report(folder / "whole", 0)]
    last = int(reports[0]["num_operations"])
    for moment in sorted({1 + round(i * (last - 1) / (NUM_MOMENTS - 1)) for i in range(NUM_MOMENTS)}):
        name = folder / f"killed-{moment}"
        assert not in_a_process(train, name, moment)
        assert in_a_process(train, name, None)
        reports.append(report(name, 1))
    kills = 0
    while not in_a_process(train, folder / "often", last // 2):
        kills += 1
    reports.append(report(folder / "often", kills))
    return reports


def main(train: Train) -> None:
    """Run the program of a module that trains: print its reports as JSON."""
    warnings.simplefilter("error")
    # A forked process has one thread, and torch adds up in another order with more.
    torch.set_num_threads(1)
    disable_progress_bar()
    print(json.dumps(kill_and_resume(train, Path(sys.argv[1]))))


def reports_of(module: str, folder: Path) -> list[Report]:
    """Return what such a program prints.

    It runs in its own process, because the process it trains in must be killed.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", module, str(folder)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]
