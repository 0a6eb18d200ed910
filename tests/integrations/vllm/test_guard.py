"""Processes end with the one that started them, however it ends. Does not need vLLM."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tests
from tests.processes import is_alive, wait_for_the_end_of

SOURCE = Path(tests.__file__).parents[1] / "src"
_PARENT = """
import subprocess, sys, time
from treering.integrations.vllm.llm import end_with_this_process
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
guard = end_with_this_process([child.pid])
print(child.pid, guard.pid, flush=True)
sys.stdin.read() if sys.argv[1] == "exits" else time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("how", ["killed", "exits"])
def test_a_child_of_a_process_that_is_gone_is_killed(how: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert parent.stdout is not None
    pids = [int(part) for part in parent.stdout.readline().split()]
    assert all(map(is_alive, pids))
    if how == "killed":
        parent.send_signal(signal.SIGKILL)
    parent.communicate()
    wait_for_the_end_of(pids)
