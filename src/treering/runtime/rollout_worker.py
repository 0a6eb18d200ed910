"""Define the rollout workers: an engine in its own process samples the controller's requests or runs episodes.

They keep no essential state: rollouts of a dead worker are sampled again elsewhere, with the same tokens.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from treering.engine.protocol import Engine, EngineStats, Request, Rollout, RolloutKey
from treering.history.store.history_reader import HistoryReader
from treering.ranks.group import RankGroup
from treering.rl.drafting import make_drafter
from treering.rl.environments.environment import Environment, EnvironmentTask
from treering.rl.environments.episodes import Episode, Episodes, Run
from treering.rl.rehearsal import Rehearsal, with_kept, with_rehearsed
from treering.runtime.messages import (
    BeginStep,
    CloseEnvironment,
    EndedWork,
    EnvironmentClosed,
    GiveUp,
    Ready,
    RefreshHistory,
    RehearseRequests,
    ReportReceived,
    SampleRequests,
    WorkerSettings,
)
from treering.runtime.weight_store import load_weights
from treering.schedule.measured_latency import MeasuredTimes

_REPORT_S = 0.2
"""Minimum seconds between progress reports."""

_ALIVE_S = 10.0
"""Maximum seconds between messages while a worker samples, except during one pass."""

_TICK_S = 0.05
"""Seconds between looks at the inbox while a worker's episodes run."""


class StepEngine:
    """Engine of a rollout worker; every step begins with the weights and history that the controller names.

    Example: after `begin` of a step with policy version 3, `engine.version` is 3.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        """Build the model, but no engine yet; if the worker drafts, it reads the history from a folder."""
        self.step = 0
        """Number of the current step."""
        self._recipe = settings.recipe
        self._model = settings.recipe.make_model()
        self._history = None if settings.history is None else HistoryReader(settings.history)
        has_drafts = settings.drafts is not None and self._history is not None
        self._drafter = make_drafter(self._history, settings.drafts) if has_drafts else None  # type: ignore[arg-type]
        self._engine: Engine | None = None
        self._before = self._begun = EngineStats()
        self._rehearsal = Rehearsal(settings.rehearse)
        self._early: Sequence[Request] = ()
        self._lengths: list[int] = []

    @property
    def has_engine(self) -> bool:
        """Whether a step has begun."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """Engine of the current step."""
        assert self._engine is not None, "a step begins before its requests come"
        return self._engine

    def begin(self, message: BeginStep) -> bool:
        """Begin a step while the engine is idle; return whether the engine is a new one."""
        self.step = message.step
        self._end_rehearsals()
        if self._drafter is not None:
            self.refresh_history()
            # Reset the drafter's measurements, which belong to one step.
            self._drafter.load_state(self._drafter.state())
            if self._engine is not None:
                self._engine.refresh_history()
        if self._engine is not None and self._engine.version == message.policy_version:
            # The weights are the same, but caches of the previous step would change rounding.
            self._engine = None
        else:
            load_weights(message.weights, self._model)
        if self._engine is not None:
            self._engine.update_weights(message.policy_version)
            self._begun = self._engine.stats
            return False
        self._engine = self._recipe.make_engine(self._model, self._drafter, message.policy_version)
        self._before = self._begun = self._engine.stats
        return True

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests of the step, with what was rehearsed of them."""
        self.engine.submit(with_rehearsed(requests, self._rehearsal.tokens))

    def rehearse(self, requests: Sequence[Request]) -> None:
        """Sample requests of the next step: in idle rows, or, where a row takes time, once no rollout runs."""
        self._early = requests
        self._begin_rehearsals()

    def note_ended(self, rollouts: Sequence[Rollout]) -> None:
        """Record the lengths of ended rollouts."""
        self._lengths += [rollout.num_tokens for rollout in rollouts]
        self._begin_rehearsals()

    def with_kept(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return ended rollouts with how much of their rehearsals they kept."""
        return [with_kept(rollout, self._rehearsal.tokens) for rollout in rollouts]

    def _begin_rehearsals(self) -> None:
        if self._early and (self.engine.num_unfinished == 0 or self.engine.row_price < 1.0):
            self._rehearsal.begin(self.engine, self._early)
            self._early = ()

    def _end_rehearsals(self) -> None:
        """Take what was rehearsed since the step began, and learn how much of the previous rehearsals it kept."""
        self._early = ()
        if self._engine is None or not self._rehearsal.is_on(self._engine):
            return
        self._rehearsal.end(self._engine)
        self._rehearsal.note(self._engine.stats.since(self._begun), self._lengths, RankGroup())
        self._lengths = []

    def take_stats(self) -> EngineStats:
        """Return the engine's counts since the previous call."""
        before, self._before = self._before, self.engine.stats
        return self._before.since(before)

    def refresh_history(self) -> None:
        """Load the published history from its folder."""
        if self._history is not None:
            self._history.refresh()


class PassTimer:
    """Timer of an engine's forward passes.

    A pass is timed from the end of the previous one, so that message handling counts; after a pause, from its own
    start. An engine's first pass does not count, because it compiles, allocates, and measures draft costs.

    Example: 5 passes over 3, 3, 3, 2 and 1 rows record the times of the last four.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start without times; `clock` returns seconds."""
        self._clock = clock
        self._times = MeasuredTimes()
        self._before = EngineStats()
        self._since_s: float | None = None
        self._is_first = True

    def note_engine(self, stats: EngineStats) -> None:
        """Start timing a new engine with these counts."""
        self._before, self._since_s, self._is_first = stats, None, True

    def note_load(self, seconds: float) -> None:
        """Record the time of a weight load."""
        self._times.note_load(seconds)

    def begin(self) -> None:
        """Mark the start of a pass."""
        if self._since_s is None:
            self._since_s = self._clock()

    def end(self, stats: EngineStats, *, num_unfinished: int) -> None:
        """Mark the end of a pass, with the engine's counts and unfinished requests."""
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
        """Skip the time until the next pass, because all running rollouts were removed."""
        self._since_s = None

    def take(self) -> MeasuredTimes:
        """Return the times since the previous call."""
        times, self._times = self._times, MeasuredTimes()
        return times


class RolloutWorker:
    """Role of a worker that samples rollouts: an engine, its current step, and counters."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Build the model."""
        self._own = StepEngine(settings)
        self._busy_s = 0.0
        self._reports = False
        self._reported_s = self._sent_s = 0.0
        self._is_report_received = True
        self._ended: list[Rollout] = []
        self._given: list[Rollout] | None = None
        self._timer = PassTimer()
        self._is_new = True

    @property
    def is_busy(self) -> bool:
        """Whether rollouts have to be sampled or a message is due."""
        is_rehearsing = self._own.has_engine and self._own.engine.is_rehearsing
        return self._is_new or self._is_sampling or is_rehearsing or self._given is not None or bool(self._ended)

    @property
    def _is_sampling(self) -> bool:
        return self._own.has_engine and self._own.engine.num_unfinished > 0

    def do(self, message: Any) -> None:
        """Handle a message from the controller."""
        started = time.perf_counter()
        if isinstance(message, BeginStep):
            self._begin(message)
        elif isinstance(message, SampleRequests):
            self._own.submit(message.requests)  # type: ignore[arg-type]
        elif isinstance(message, RehearseRequests):
            self._own.rehearse(message.requests)
        elif isinstance(message, GiveUp):
            self._give(message.keys)
        elif isinstance(message, ReportReceived):
            self._is_report_received = True
        elif isinstance(message, RefreshHistory):
            self._own.refresh_history()
        self._busy_s += time.perf_counter() - started

    def advance(self) -> list[Any]:
        """Run one engine pass; return a message if rollouts ended or were given up, or a report is due."""
        if self._is_new:
            self._is_new = False
            return [Ready(pid=os.getpid())]
        if self._is_sampling:
            self._ended += self._pass()
        elif self._own.has_engine and self._own.engine.is_rehearsing:
            # Neither timed nor busy: nothing waits for it.
            self._own.engine.step()
        is_due = self._is_report_due or (self._is_sampling and time.perf_counter() >= self._sent_s + _ALIVE_S)
        return [self._message()] if self._ended or self._given is not None or is_due else []

    @property
    def _is_report_due(self) -> bool:
        """Whether to report progress; never before the last report was received, so that few are in flight."""
        is_time = time.perf_counter() >= self._reported_s + _REPORT_S
        return self._reports and self._is_report_received and is_time and self._is_sampling

    def _pass(self) -> list[Rollout]:
        engine, started = self._own.engine, time.perf_counter()
        self._timer.begin()
        rollouts = engine.step()
        self._own.note_ended(rollouts)
        self._timer.end(engine.stats, num_unfinished=engine.num_unfinished)
        self._busy_s += time.perf_counter() - started
        return rollouts

    def _message(self) -> EndedWork:
        """Return the results since the previous message."""
        engine = self._own.engine
        self._sent_s = time.perf_counter()
        (rollouts, self._ended), (given, self._given) = (self._ended, []), (self._given, None)
        busy_s, self._busy_s = self._busy_s, 0.0
        progress = engine.progress() if self._is_report_due else {}
        if progress:
            self._reported_s, self._is_report_received = time.perf_counter(), False
        return EndedWork(
            step=self._own.step,
            ended=self._own.with_kept(rollouts),
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
        if not self._is_sampling:
            self._timer.pause()

    def _begin(self, message: BeginStep) -> None:
        started, is_first = time.perf_counter(), not self._own.has_engine
        self._sent_s = started
        self._reports = message.reports
        if self._own.begin(message):
            self._timer.note_engine(self._own.engine.stats)
        if not is_first:
            # Skip the first engine of a process, which compiles; that happens only once.
            self._timer.note_load(time.perf_counter() - started)


class EpisodeWorker:
    """Role of a worker that runs episodes: an engine, an environment, and the episodes of the current step."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Build the model and the environment."""
        self._own = StepEngine(settings)
        task = settings.recipe.make_task()
        assert isinstance(task, EnvironmentTask), "the controller checks it"
        self._task = task
        self._episodes: Episodes | None = None
        self._num_open = 0
        self._sent_s = 0.0
        self._answers: list[Any] = [Ready(pid=os.getpid())]

    @property
    def is_busy(self) -> bool:
        """Whether episodes run or a message is due."""
        return self._num_open > 0 or bool(self._answers)

    def do(self, message: Any) -> None:
        """Handle a message from the controller."""
        if isinstance(message, BeginStep):
            self._begin(message)
        elif isinstance(message, SampleRequests):
            self._start([each for each in message.requests if isinstance(each, Episode)])
        elif isinstance(message, RefreshHistory) and self._episodes is not None:
            # In the engine's thread, which drafts from the history.
            self._episodes.in_engine(self._own.refresh_history)
        elif isinstance(message, CloseEnvironment):
            self._close()

    def advance(self) -> list[Any]:
        """Wait briefly for runs to end; return a message if some have, or to show that the worker is alive."""
        answers, self._answers = self._answers, []
        if answers or self._episodes is None or self._num_open == 0:
            return answers
        runs = self._episodes.take(_TICK_S)
        self._num_open -= len(runs)
        is_due = time.perf_counter() >= self._sent_s + _ALIVE_S
        return [self._message(runs)] if runs or is_due else []

    def _begin(self, message: BeginStep) -> None:
        if self._episodes is not None:
            self._episodes.close()
        self._own.begin(message)
        self._episodes = Episodes(self._own.engine, self._task)

    def _start(self, episodes: list[Episode]) -> None:
        assert self._episodes is not None, "a step begins before its episodes come"
        if self._num_open == 0:
            self._sent_s = time.perf_counter()
        self._num_open += len(episodes)
        self._episodes.start(episodes)

    def _message(self, runs: list[Run]) -> EndedWork:
        """Return the results since the previous message."""
        now_s = time.perf_counter()
        busy_s, self._sent_s = now_s - self._sent_s, now_s
        return EndedWork(step=self._own.step, ended=runs, stats=self._own.take_stats(), busy_s=busy_s)

    def _close(self) -> None:
        if self._episodes is not None:
            self._episodes.close()
        self._num_open = 0
        if isinstance(self._task.environment, Environment):
            self._task.environment.close()
        self._answers.append(EnvironmentClosed())
