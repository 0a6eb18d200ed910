"""Starting a process whose fork server has just died."""

import multiprocessing

import pytest

from treering.errors import StateError
from treering.runtime.ipc import process
from treering.runtime.ipc.child import Port, Ready
from treering.runtime.ipc.process import MAX_DEATHS, ChildProcess
from treering.runtime.ipc.shared_memory import SharedMemory


def wait(port: Port, _: SharedMemory, settings: object) -> None:
    port.send(Ready())
    port.take()


def failing(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> ChildProcess:
    """A child whose first starts fail as they do when the fork server is gone."""
    context = multiprocessing.get_context("spawn")
    start, left = context.Process.start, [EOFError()] * num_failures

    def start_or_fail(self: multiprocessing.Process) -> None:
        if left:
            raise left.pop()
        start(self)

    monkeypatch.setattr(context.Process, "start", start_or_fail)
    monkeypatch.setattr(process, "_RETRY_S", 0.0)
    return ChildProcess("judge", wait, SharedMemory(64), context, time_limit_s=600.0)


def test_a_start_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    child = failing(monkeypatch, MAX_DEATHS - 1)
    child.start(None)
    assert child.pid is not None
    child.stop()


def test_starts_that_always_fail_end_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    child = failing(monkeypatch, MAX_DEATHS)
    with pytest.raises(StateError, match="the judge did not, last with EOFError"):
        child.start(None)
    assert child.pid is None
