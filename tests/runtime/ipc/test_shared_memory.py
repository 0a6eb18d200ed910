"""Shared memory is refused where there is no room for it, and needs no /dev/shm."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.killing import ROOT
from treering.errors import StateError
from treering.runtime.ipc import shared_memory
from treering.runtime.ipc.shared_memory import SharedMemory

EXBIBYTE = 1 << 60

SETUPS = {
    "tiny and full": "mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full",
    "read-only": "mount -t tmpfs -o ro tmpfs /dev/shm",
}
PROGRAM = """
from tests.runtime.runs import pipeline

if __name__ == "__main__":
    with pipeline(num_steps=1) as loop:
        loop.step()
        print(loop.account.scheduled)
"""


def test_more_than_the_free_memory_is_refused_with_both_numbers() -> None:
    free = shared_memory._free_memory()
    assert free is not None
    assert 0 < free < EXBIBYTE
    with pytest.raises(StateError, match=rf"{EXBIBYTE:,} bytes, and [\d,]+ bytes of memory are free.*rl\.staleness"):
        SharedMemory(EXBIBYTE)


def test_without_unnamed_memory_the_room_is_that_of_the_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    memory = SharedMemory(64)
    memory.view[:2] = b"ab"
    memory.close()
    with pytest.raises(StateError, match=rf"bytes on {tempfile.gettempdir()} are free"):
        SharedMemory(EXBIBYTE)


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS)
def test_a_run_takes_nothing_from_dev_shm(setup: str, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-Urm", "sh", "-c", SETUPS[setup]], capture_output=True, check=False).returncode:
        pytest.skip("needs user namespaces")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = ["unshare", "-Urm", "sh", "-c", f"{SETUPS[setup]} && exec {sys.executable} {program}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr
