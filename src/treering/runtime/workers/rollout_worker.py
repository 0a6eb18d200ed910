"""A rollout worker: an engine in a child process that samples the requests the controller sends.

It keeps no state that matters: after a crash its rollouts are sampled again, with the same tokens.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from treering.engine.protocol import EngineStats
from treering.engine.rollout import Rollout, RolloutKey
from treering.runtime.ipc.child import Port, Ready, WeightAccess
from treering.runtime.ipc.messages import (
    BeginStep,
    EndedWork,
    GiveUp,
    PromptHistories,
    RefreshHistory,
    ReportReceived,
    SampleRequests,
    WorkerSettings,
)
from treering.runtime.ipc.weight_store import ProcessWeights
from treering.runtime.workers.step_engine import StepEngine
from treering.schedule.measured_latency import PassTimes

_REPORT_S = 0.2
"""Least seconds between progress reports."""

_ALIVE_S = 10.0
"""Most seconds without a message while it samples, except during one pass."""


def run_rollout_worker(port: Port, access: WeightAccess, settings: WorkerSettings) -> None:
    """The role of a rollout worker."""
    model = settings.recipe.make_model()
    worker = _Worker(settings, model, access.open(model, port))
    port.send(Ready())
    while True:
        messages = port.take_ready() if worker.is_busy else [port.take()]
        for message in messages:
            worker.do(message)
        sampled = worker.advance()
        if sampled is not None:
            port.send(sampled)


class PassTimer:
    """Times the forward passes of an engine.

    A pass is timed from the end of the previous one, so that message handling counts; after a pause, from its own
    start. An engine's first pass is left out: it compiles, allocates, and measures draft costs.

    Example: 5 passes over 3, 3, 3, 2 and 1 rows record the times of the last four.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: returns seconds."""
        self._clock = clock
        self._times = PassTimes()
        self._before = EngineStats()
        self._since_s: float | None = None
        self._is_first = True

    def note_engine(self, stats: EngineStats) -> None:
        """Starts timing a new engine with these counts."""
        self._before, self._since_s, self._is_first = stats, None, True

    def note_load(self, seconds: float) -> None:
        """Records the time of a weight load."""
        self._times.note_load(seconds)

    def begin(self) -> None:
        """Marks the start of a pass."""
        if self._since_s is None:
            self._since_s = self._clock()

    def end(self, stats: EngineStats, *, num_unfinished: int) -> None:
        """Marks the end of a pass, with the engine's counts and unfinished requests."""
        assert self._since_s is not None, "a pass begins before it ends"
        now_s = self._clock()
        before, seconds = self._before, now_s - self._since_s
        self._before = stats
        self._since_s = now_s if num_unfinished else None
        if stats.num_forwards == before.num_forwards:
            return
        if self._is_first:
            self._is_first = False
            return
        self._times.note_pass(
            seconds,
            num_rows=stats.num_rows - before.num_rows,
            num_prefilled=stats.num_prefilled - before.num_prefilled,
            num_sampled=stats.num_sampled - before.num_sampled,
            num_passes=stats.num_forwards - before.num_forwards,
        )

    def pause(self) -> None:
        """Leaves out the time until the next pass, because all running rollouts were removed."""
        self._since_s = None

    def take(self) -> PassTimes:
        """The times since the previous call."""
        times, self._times = self._times, PassTimes()
        return times


class _Worker:
    """The engine, its current step and its counters."""

    def __init__(self, settings: WorkerSettings, model: nn.Module, weights: ProcessWeights) -> None:
        self._own = StepEngine(settings, model, weights)
        self._busy_s = 0.0
        self._reports = False
        self._reported_s = self._sent_s = 0.0
        self._is_report_received = True
        self._ended: list[Rollout] = []
        self._given: list[Rollout] | None = None
        self._timer = PassTimer()

    @property
    def is_busy(self) -> bool:
        return self._own.has_engine and self._own.engine.num_unfinished > 0

    def do(self, message: Any) -> None:
        started = time.perf_counter()
        if isinstance(message, BeginStep):
            self._begin(message)
        elif isinstance(message, SampleRequests):
            self._own.engine.submit(message.requests)  # type: ignore[arg-type]
        elif isinstance(message, GiveUp):
            self._give(message.keys)
        elif isinstance(message, ReportReceived):
            self._is_report_received = True
        elif isinstance(message, PromptHistories | RefreshHistory):
            self._own.take_history(message)
        self._busy_s += time.perf_counter() - started

    def advance(self) -> EndedWork | None:
        """Runs one engine pass; returns a message if rollouts ended or were given up, or a report is due."""
        if self.is_busy:
            self._ended += self._pass()
        is_due = self._is_report_due or (self.is_busy and time.perf_counter() >= self._sent_s + _ALIVE_S)
        return self._message() if self._ended or self._given is not None or is_due else None

    @property
    def _is_report_due(self) -> bool:
        """Whether to report progress; never before the last report was received, so that the pipe cannot fill up."""
        is_time = time.perf_counter() >= self._reported_s + _REPORT_S
        return self._reports and self._is_report_received and is_time and self.is_busy

    def _pass(self) -> list[Rollout]:
        engine, started = self._own.engine, time.perf_counter()
        self._timer.begin()
        rollouts = engine.step()
        self._timer.end(engine.stats, num_unfinished=engine.num_unfinished)
        self._busy_s += time.perf_counter() - started
        return rollouts

    def _message(self) -> EndedWork:
        """The results since the previous message."""
        engine = self._own.engine
        self._sent_s = time.perf_counter()
        (rollouts, self._ended), (given, self._given) = (self._ended, []), (self._given, None)
        busy_s, self._busy_s = self._busy_s, 0.0
        progress = engine.progress() if self._is_report_due else {}
        if progress:
            self._reported_s, self._is_report_received = time.perf_counter(), False
        return EndedWork(
            step=self._own.step,
            ended=rollouts,
            given=given,
            progress=progress,
            stats=self._own.take_stats(),
            busy_s=busy_s,
            times=self._timer.take(),
        )

    def _give(self, keys: Sequence[RolloutKey]) -> None:
        out = self._own.engine.abort(keys)
        self._given = [rollout for rollout in out if rollout.finish_reason == "abort"]
        self._ended += [rollout for rollout in out if rollout.finish_reason != "abort"]
        if not self.is_busy:
            self._timer.pause()

    def _begin(self, message: BeginStep) -> None:
        started, is_first = time.perf_counter(), not self._own.has_engine
        self._sent_s = started
        self._reports = message.reports
        if self._own.begin(message):
            self._timer.note_engine(self._own.engine.stats)
        if not is_first:
            # Leave out the first engine of a process: it compiles, which happens only once.
            self._timer.note_load(time.perf_counter() - started)
