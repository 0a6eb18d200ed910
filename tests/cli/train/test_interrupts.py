"""A run that signals interrupt at any moment resumes to bitwise the same weights, and leaves no process behind."""

import random
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.runs import assert_same_weights, started, weights
from tests.cli.train.test_command import prompts
from treering.cli.run_training import run_train

MARK = "TREERING_TEST_OF_SIGNALS"
NUM_STEPS = 6
ALONE = (("metrics.jsonl", 2, signal.SIGINT),)
"""A file of the run, the number of its lines after which a signal comes, and the signal."""


def settings(run_dir: str, workers: int) -> list[str]:
    """Settings under which no decision reads a clock."""
    overrides = [f"run.dir={run_dir}", f"runtime.workers={workers}", f"rl.num_steps={NUM_STEPS}", "run.save_every=1h"]
    return [*overrides, "runtime.rebalance=none", "history.drafts=off"]


def marked(run_dir: str) -> list[int]:
    """Return the processes of a run, recognised by an environment variable that they inherit."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if f"{MARK}={run_dir}".encode() in environment:
            found.append(int(entry.name))
    return found


def wait_for_lines(file: Path, num_lines: int, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        if file.is_file() and file.read_bytes().count(b"\n") >= num_lines:
            return
        time.sleep(0.01)


@pytest.mark.slow
def test_a_run_interrupted_at_random_moments_ends_with_the_same_weights(folder: Path) -> None:
    check_interruptions(folder, 0, ALONE)


def check_interruptions(folder: Path, workers: int, interruptions: Sequence[tuple[str, int, signal.Signals]]) -> None:
    """Train with and without interruptions, and compare the weights."""
    path, generator = prompts(folder, "tests.cli.train.test_command:length_of"), random.Random(workers)
    run_train(config_path=path, overrides=settings("whole", workers), json_output=True)
    num_interrupted = 0
    for name, num_lines, number in interruptions:
        process = started(folder, "train", str(path), "--json", *settings("often", workers), **{MARK: "often"})
        # Signals come only after the run has a file: until the command is imported, Python itself handles them.
        wait_for_lines(folder / "often" / name, num_lines, process)
        time.sleep(generator.uniform(0.0, 0.3 if workers else 0.01))
        process.send_signal(number)
        num_interrupted += check_end(folder, number, process)
    run_train(config_path=path, overrides=settings("often", workers), json_output=True)
    assert num_interrupted > 0
    assert_same_weights(folder / "whole", folder / "often", NUM_STEPS)


def check_end(folder: Path, number: signal.Signals, process: subprocess.Popen[str]) -> bool:
    """Return whether the run was interrupted; check that it reported it, saved logged steps and left no process."""
    _, err = process.communicate(timeout=300)
    assert "Traceback" not in err
    is_interrupted = process.returncode == 128 + number
    if is_interrupted:
        done = "(no step is done; |step [0-9]+ is saved and [0-9]+ is next; |)"
        how = f"{done}the same command (begins|resumes) the run in often|start the same command again"
        assert re.fullmatch(f"treering: interrupted by {number.name}; ({how})", err.splitlines()[-1])
        # Logged steps are saved only by the interruption: nothing else saves within the hour.
        rows = folder / "often" / "metrics.jsonl"
        num_done = rows.read_bytes().count(b"\n") if rows.exists() else 0
        assert not num_done or (folder / "often" / "checkpoints" / f"step-{num_done:06d}").is_dir()
    elif process.returncode:
        # After a run's result the signal has its usual effect.
        assert (process.returncode, "interrupted" in err) == (-number, False)
        assert weights(folder / "often", NUM_STEPS)
    deadline = time.monotonic() + 60
    while marked("often") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marked("often") == []
    return is_interrupted
