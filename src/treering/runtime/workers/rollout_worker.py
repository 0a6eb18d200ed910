"""A rollout worker: an engine in a child process that samples the requests the controller sends.

It keeps no state that matters: after a crash its rollouts are sampled again, with the same tokens.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treering.engine.protocol import Engine, EngineStats
from treering.engine.rollout import Rollout, RolloutKey
from treering.history.draft.drafter import Drafter
from treering.history.store.reader import HistoryReader
from treering.rl.drafting import DraftOptions, make_drafter
from treering.runtime.ipc.child import Port, Ready
from treering.runtime.ipc.messages import Begin, Give, Heard, Refresh, Sample, Sampled, WorkerSettings
from treering.runtime.ipc.shared_memory import SharedMemory
from treering.runtime.ipc.weight_ring import WeightRing
from treering.runtime.workers.pass_watch import PassWatch

_REPORT_S = 0.2
"""Between reports on how far rollouts are, at least."""


def work(port: Port, memory: SharedMemory, settings: WorkerSettings) -> None:
    """The role of a rollout worker."""
    worker = _Worker(settings, memory)
    port.send(Ready())
    while True:
        messages = port.take_ready() if worker.is_busy else [port.take()]
        for message in messages:
            worker.do(message)
        sampled = worker.advance()
        if sampled is not None:
            port.send(sampled)


class _Memory:
    """The history of the controller's store, and the drafter that reads it."""

    def __init__(self, folder: Path, options: DraftOptions) -> None:
        self._reader = HistoryReader(folder)
        self.drafter = make_drafter(self._reader, options)

    def begin(self) -> None:
        """Starts a step: what is published is seen, and whether drafts pay is found out anew."""
        self._reader.refresh()
        self.drafter.load_state(self.drafter.state())

    def refresh(self) -> None:
        self._reader.refresh()


class _Worker:
    """The engine and what it was told."""

    def __init__(self, settings: WorkerSettings, memory: SharedMemory) -> None:
        self._recipe = settings.recipe
        self._model = settings.recipe.make_model()
        self._ring = WeightRing(self._model, settings.num_slots, memory)
        self._memory = None if settings.history is None else _Memory(settings.history, settings.drafts)
        self._engine: Engine | None = None
        self._step = 0
        self._before = EngineStats()
        self._busy_s = 0.0
        self._reports = False
        self._reported_s = 0.0
        self._is_heard = True
        self._ended: list[Rollout] = []
        self._given: list[Rollout] | None = None
        self._watch = PassWatch()

    @property
    def is_busy(self) -> bool:
        return self._engine is not None and self._engine.num_unfinished > 0

    def do(self, message: Any) -> None:
        started = time.perf_counter()
        if isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, Sample):
            assert self._engine is not None, "a step begins before its requests come"
            self._engine.submit(message.requests)
        elif isinstance(message, Give):
            self._give(message.keys)
        elif isinstance(message, Heard):
            self._is_heard = True
        elif isinstance(message, Refresh) and self._memory is not None:
            self._memory.refresh()
        self._busy_s += time.perf_counter() - started

    def advance(self) -> Sampled | None:
        """One pass of the engine; a message where rollouts have ended or were given up, or a report is due."""
        if self.is_busy:
            self._ended += self._pass()
        return self._news() if self._ended or self._given is not None or self._is_report_due else None

    @property
    def _is_report_due(self) -> bool:
        """Whether to say how far rollouts are; never before the report before was heard, lest one fills the pipe."""
        is_time = time.perf_counter() >= self._reported_s + _REPORT_S
        return self._reports and self._is_heard and is_time and self.is_busy

    def _pass(self) -> list[Rollout]:
        assert self._engine is not None, "only an engine is busy"
        started = time.perf_counter()
        self._watch.begin()
        rollouts = self._engine.step()
        self._watch.end(self._engine.stats, num_unfinished=self._engine.num_unfinished)
        self._busy_s += time.perf_counter() - started
        return rollouts

    def _news(self) -> Sampled:
        """What has happened since the message before."""
        assert self._engine is not None, "nothing happens before a step has begun"
        (rollouts, self._ended), (given, self._given) = (self._ended, []), (self._given, None)
        busy_s, self._busy_s = self._busy_s, 0.0
        before, self._before = self._before, self._engine.stats
        progress = self._engine.progress() if self._is_report_due else {}
        if progress:
            self._reported_s, self._is_heard = time.perf_counter(), False
        return Sampled(
            step=self._step,
            rollouts=rollouts,
            given=given,
            progress=progress,
            stats=self._before.since(before),
            busy_s=busy_s,
            times=self._watch.take(),
        )

    def _give(self, keys: Sequence[RolloutKey]) -> None:
        assert self._engine is not None, "a worker gives up what it has begun"
        out = self._engine.abort(keys)
        self._given = [rollout for rollout in out if rollout.finish_reason == "abort"]
        self._ended += [rollout for rollout in out if rollout.finish_reason != "abort"]
        if not self.is_busy:
            self._watch.pause()

    def _begin(self, message: Begin) -> None:
        started, is_first = time.perf_counter(), self._engine is None
        self._step, self._reports = message.step, message.reports
        if self._memory is not None:
            self._memory.begin()
        if self._engine is not None and self._engine.version == message.label:
            # Nothing was learnt since, but what an engine keeps of the step before would change how sums are rounded.
            self._engine = None
        else:
            self._ring.read(message.version, self._model)
        if self._engine is not None:
            self._engine.update_weights(message.label)
        else:
            self._engine = self._recipe.make_engine(self._model, self._drafter, message.label)
            self._before = self._engine.stats
            self._watch.note_engine(self._before)
        if not is_first:
            # The first engine of a process compiles, which no other step waits for.
            self._watch.note_load(time.perf_counter() - started)

    @property
    def _drafter(self) -> Drafter | None:
        return None if self._memory is None else self._memory.drafter
