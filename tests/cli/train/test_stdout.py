"""Stdout of `treering train --json` is one object, whatever user code prints and however."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.cli.train.test_command import prompts
from tests.killing import ROOT

NOISY = """
import ctypes, os, subprocess, sys, threading

print("printed at import")

def reward(prompt, text):
    print("printed by python")
    sys.__stdout__.write("written to the first stdout\\n")
    os.write(1, b"written to the descriptor\\n")
    subprocess.run(["echo", "printed by a process"], check=True)
    libc = ctypes.CDLL(None)
    libc.puts(b"printed by C")
    libc.fflush(None)
    threading.Thread(target=print, args=("printed by a thread",)).start()
    sys.stdout.close()
    return float(len(text.split()))
"""


def test_what_user_code_prints_goes_to_stderr(folder: Path) -> None:
    # The trial of a reward is in the command's process, all others are in the worker's.
    (folder / "noisy.py").write_text(NOISY)
    path = prompts(folder, "noisy:reward")
    command = [sys.executable, "-c", "from treering.cli.start import main; main()", "train", str(path), "--json"]
    source = os.pathsep.join([str(ROOT / "src"), str(folder)])
    done = subprocess.run(
        [*command, "run.dir=out", "rl.num_steps=1", "runtime.workers=1"],
        env=os.environ | {"PYTHONPATH": source},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_steps"] == 1
    for line in ("at import", "by python", "to the first stdout", "to the descriptor", "by a process", "by C"):
        assert line in done.stderr
