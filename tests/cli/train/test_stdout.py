"""Stdout of `treering train --json` is one object, whatever user code prints and however."""

import json
from pathlib import Path

from tests.cli.runs import started
from tests.cli.train.test_command import prompts

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
    (folder / "noisy.py").write_text(NOISY)
    path = prompts(folder, "noisy:reward")
    process = started(folder, "train", str(path), "--json", "run.dir=out", "rl.num_steps=1")
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    assert json.loads(out)["num_steps"] == 1
    for line in ("at import", "by python", "to the first stdout", "to the descriptor", "by a process", "by C"):
        assert line in err
