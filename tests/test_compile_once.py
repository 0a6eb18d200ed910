"""Processes that start together compile a function only once; without a cache folder each compiles it."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core.caching import FunctionCache

from treering.compiling import once
from treering.compiling.once import compiled_once
from treering.files.lock import FileLock

MODULE = """
from treering.compiling.once import compiled_once
@compiled_once()
def inner(number):
    return 2 * number
@compiled_once()
def outer(number):
    return inner(number) + 1
"""
TOGETHER = """
import sys, time
from pathlib import Path
from numba.core import event
import functions
Path(sys.argv[1]).touch()
while len(list(Path(sys.argv[1]).parent.glob("ready-*"))) < int(sys.argv[2]):
    time.sleep(0.001)
with event.install_recorder("numba:compile") as found:
    assert functions.outer(3) == 7
print(sum(step.is_start for _, step in found.buffer))
"""


@pytest.fixture
def started(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "functions.py").write_text(MODULE)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    return {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": path}


def start(environment: dict[str, str], folder: Path, name: str, num_processes: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", TOGETHER, str(folder / f"ready-{name}"), str(num_processes)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_processes_that_start_together_compile_each_function_once(tmp_path: Path, started: dict[str, str]) -> None:
    processes = [start(started, tmp_path, str(number), 3) for number in range(3)]
    counts = [int(process.communicate(timeout=100)[0]) for process in processes]
    assert sorted(counts) == [0, 0, 2]


def test_a_dead_holder_is_not_waited_for_and_one_that_stands_still_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "compiling.lock"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        held = FileLock(file, str)
        os.write(writer, b"x")
        signal.pause()
        os._exit(int(held.is_held))
    try:
        os.read(reader, 1)
        monkeypatch.setattr(once, "_WAIT_S", 0.2)
        assert once._lock(file) is None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
    lock = once._lock(file)
    assert lock is not None
    lock.release()


def test_a_lock_that_cannot_be_had_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "compiling.lock").mkdir()
    assert once._lock(tmp_path / "compiling.lock") is None


def test_without_a_cache_folder_functions_compile_and_it_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(FunctionCache, "__init__", refuse)
    with pytest.warns(UserWarning, match="no folder can be written.*NUMBA_CACHE_DIR"):
        triple = compiled_once()(lambda number: 3 * number)
    assert triple(2) == 6


def test_on_a_full_disk_functions_compile_and_it_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FunctionCache, "save_overload", fill)
    triple = compiled_once()(lambda number: 3 * number)
    with pytest.warns(UserWarning, match="No space left on device.*NUMBA_CACHE_DIR"):
        assert triple(2) == 6
