"""Starting a process whose fork server has just died."""

import multiprocessing

import pytest

from treering.errors import StateError
from treering.runtime.ipc import local_launcher
from treering.runtime.ipc.child import Port, Ready, WeightAccess
from treering.runtime.ipc.local_launcher import MAX_ATTEMPTS, LocalLauncher
from treering.runtime.ipc.process import ChildProcess
from treering.runtime.ipc.ring_access import RingAccess
from treering.runtime.ipc.shared_memory import SharedMemory


def wait(port: Port, _: WeightAccess, settings: object) -> None:
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
    monkeypatch.setattr(local_launcher, "_RETRY_S", 0.0)
    launcher = LocalLauncher()
    launcher._access = RingAccess(memory=SharedMemory(64), num_slots=1)
    return ChildProcess("judge", "reward_worker", wait, launcher, time_limit_s=600.0)


def test_a_start_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    child = failing(monkeypatch, MAX_ATTEMPTS - 1)
    child.start(None)
    assert child.pid is not None
    child.stop()


def test_starts_that_always_fail_end_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    child = failing(monkeypatch, MAX_ATTEMPTS)
    with pytest.raises(StateError, match="the judge did not, last with EOFError"):
        child.start(None)
    assert child.pid is None
