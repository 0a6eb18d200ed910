"""A rollout worker that runs episodes: an engine and an environment in a child process.

It keeps no state that matters: after a crash its episodes are run anew, with the same tokens where the environment
reads no clock.
"""

import os
import subprocess
import sys
import time
from typing import Any

from treering.rl.environments.environment import Environment
from treering.rl.environments.episodes import Episode, Episodes
from treering.rl.environments.run import Run
from treering.rl.environments.task import EnvironmentTask
from treering.runtime.ipc.child import Port, Ready, WeightAccess
from treering.runtime.ipc.messages import (
    BeginStep,
    CloseEnvironment,
    EndedWork,
    PromptHistories,
    RefreshHistory,
    SampleRequests,
    WorkerSettings,
)
from treering.runtime.workers.step_engine import StepEngine

_TICK_S = 0.05
"""How often a worker looks for messages while its episodes run."""

_WATCH = """
import os, signal, sys
sys.stdin.buffer.read()
os.killpg(int(sys.argv[1]), signal.SIGKILL)
"""
"""Reads until the pipe's other end is gone, then kills the group."""

_ALIVE_S = 10.0
"""Most seconds without a message while episodes run."""


def run_episode_worker(port: Port, access: WeightAccess, settings: WorkerSettings) -> None:
    """The role of a rollout worker that runs episodes."""
    # With its process group end the processes that an environment has started, also where all others are killed.
    os.setpgid(0, 0)
    guard = end_group_with_this_process()
    model = settings.recipe.make_model()
    task = settings.recipe.make_task()
    assert isinstance(task, EnvironmentTask), "the controller checks it"
    worker = _Worker(task, StepEngine(settings, model, access.open(model, port)))
    port.send(Ready())
    while guard.stdin is not None:
        for message in port.take_ready() if worker.is_busy else [port.take()]:
            worker.do(message)
        ended = worker.advance()
        if ended is not None:
            port.send(ended)


class _Worker:
    """The episodes of the current step, and counters."""

    def __init__(self, task: EnvironmentTask, own: StepEngine) -> None:
        self._task = task
        self._own = own
        self._episodes: Episodes | None = None
        self._num_open = 0
        self._sent_s = 0.0

    @property
    def is_busy(self) -> bool:
        return self._num_open > 0

    def do(self, message: Any) -> None:
        if isinstance(message, BeginStep):
            self._begin(message)
        elif isinstance(message, SampleRequests):
            self._start([each for each in message.requests if isinstance(each, Episode)])
        elif isinstance(message, PromptHistories | RefreshHistory):
            self._take_history(message)
        elif isinstance(message, CloseEnvironment):
            self._close()

    def advance(self) -> EndedWork | None:
        """Waits a little for runs to end; returns a message if some have, or it is time to be heard."""
        if self._episodes is None or not self.is_busy:
            return None
        runs = self._episodes.take(_TICK_S)
        self._num_open -= len(runs)
        is_due = time.perf_counter() >= self._sent_s + _ALIVE_S
        return self._message(runs) if runs or is_due else None

    def _begin(self, message: BeginStep) -> None:
        if self._episodes is not None:
            self._episodes.close()
        self._own.begin(message)
        self._episodes = Episodes(self._own.engine, self._task)

    def _start(self, episodes: list[Episode]) -> None:
        assert self._episodes is not None, "a step begins before its episodes come"
        if not self.is_busy:
            self._sent_s = time.perf_counter()
        self._num_open += len(episodes)
        self._episodes.start(episodes)

    def _take_history(self, message: PromptHistories | RefreshHistory) -> None:
        """In the thread of the engine, which drafts from it."""
        if self._episodes is None:
            self._own.take_history(message)
        else:
            self._episodes.in_engine(lambda: self._own.take_history(message))

    def _message(self, runs: list[Run]) -> EndedWork:
        """The results since the previous message."""
        now_s = time.perf_counter()
        busy_s, self._sent_s = now_s - self._sent_s, now_s
        return EndedWork(step=self._own.step, ended=runs, stats=self._own.take_stats(), busy_s=busy_s)

    def _close(self) -> None:
        if self._episodes is not None:
            self._episodes.close()
        if isinstance(self._task.environment, Environment):
            self._task.environment.close()
        os._exit(0)


def end_group_with_this_process() -> "subprocess.Popen[bytes]":
    """Starts a small process that kills this one's group when this one has ended, however it did; keep the result."""
    command = [sys.executable, "-S", "-c", _WATCH, str(os.getpgrp())]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
