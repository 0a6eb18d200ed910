"""The event loop of a run: receives messages from the child processes and sends each its next work."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait

from treering.engine.rollout import Rollout, RolloutKey
from treering.rl.judging import RewardResult
from treering.runtime.ipc.messages import Case, TrainedStep
from treering.runtime.ipc.process import ChildProcess
from treering.runtime.ipc.weight_ring import WeightRing
from treering.runtime.pools.reward_client import RewardClient
from treering.runtime.pools.rollout_pool import RolloutPool
from treering.runtime.pools.trainer_client import TrainerClient
from treering.runtime.step.step_run import StepRun
from treering.schedule.measured_latency import PassTimes

_LISTEN_S = 1.0
"""Longest wait for a message; deaths that close no pipe are seen after it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finished:
    """A step that is sampled, judged and trained.

    Attributes:
        run: its rollouts.
        done: its training.
        label: policy version that sampled it.
        trainer_wait_s: in which the trainer had nothing to train before it.
        bubble: share of the workers' time since the step before in which they sampled nothing.
        times: of passes and loads since the step before, and of its update.
    """

    run: StepRun
    done: TrainedStep
    label: int
    trainer_wait_s: float
    bubble: float
    times: PassTimes


class Controller:
    """Rollout workers, judge and trainer of one run.

    Example: with the steps 4 and 5 open, `finish(4, print)` returns once 4 is trained, and 5 is sampled all the while.
    """

    def __init__(
        self,
        fleet: RolloutPool,
        court: RewardClient,
        workshop: TrainerClient,
        ring: WeightRing,
        *,
        labels: Mapping[int, int],
        on_over: Callable[[Rollout], bool] | None,
    ) -> None:
        """Takes processes that have been started.

        Args:
            fleet: rollout workers.
            court: the judge.
            workshop: the trainer.
            ring: of weights.
            labels: version -> updates behind it, of those that the ring has.
            on_over: takes each rollout that is over; whether workers find something new in the history since.
        """
        self._fleet = fleet
        self._court = court
        self.workshop = workshop
        self.ring = ring
        self.labels = dict(labels)
        self._on_over = on_over
        self._runs: dict[int, StepRun] = {}
        self._judged_for: dict[RolloutKey, StepRun] = {}
        self._idle_since_s = self._step_since_s = time.perf_counter()

    @property
    def seats(self) -> list[ChildProcess]:
        """Where the processes sit."""
        return [*self._fleet.seats, self._court.seat, self.workshop.seat]

    @property
    def last_open(self) -> int:
        """The latest step that is being sampled; 0 where there is none."""
        return max(self._runs, default=0)

    def wait_until_ready(self) -> None:
        """Returns when every process has built its part, and counts time from then on.

        Raises:
            StateError, Exception: as `finish`.
        """
        while not all(seat.is_ready for seat in self.seats):
            self._listen()
        self._idle_since_s = self._step_since_s = time.perf_counter()

    def open(self, run: StepRun) -> None:
        """Begins to sample a step, the one behind the latest."""
        self._runs[run.step] = run

    def dispatch(self) -> None:
        """Gives everybody what they can do now."""
        self._fleet.dispatch(self._runs, self.labels)
        self._court.dispatch()

    def finish(self, step: int, on_sampled: Callable[[StepRun], None]) -> Finished:
        """Works until a step is trained, the first one that is open.

        Args:
            step: its number.
            on_sampled: takes the step when its training begins; what it does costs the trainer no time.

        Raises:
            StateError: a process dies again and again.
            Exception: the error that ended a process.
        """
        run, sent_s = self._runs[step], None
        while True:
            self.dispatch()
            if sent_s is None and run.is_whole:
                self.workshop.train(step, run.collection.result().groups)
                sent_s = time.perf_counter()
                on_sampled(run)
            done = self._listen()
            if done is not None:
                assert sent_s is not None, "a step is trained after it was sent"
                return self._finished(run, done, sent_s)

    def announce(self, version: int, label: int) -> None:
        """Tells that the ring has a version, and forgets the one whose place it has taken."""
        self.labels[version] = label
        self.labels = {
            known: updates for known, updates in self.labels.items() if known > version - self.ring.num_slots
        }

    def close(self) -> None:
        """Ends all processes."""
        self._fleet.close()
        self._court.close()
        self.workshop.close()
        self.ring.close()

    def _listen(self) -> TrainedStep | None:
        """Waits for something to happen and takes it in; the trained step, if that was it."""
        parts = (self._fleet, self._court, self.workshop)
        left_s = self._court.seconds_left()
        connections = [each for part in parts for each in part.connections()]
        wait(connections, _LISTEN_S if left_s is None else min(_LISTEN_S, left_s))
        for run, case in self._fleet.receive(self._runs):
            self._judge(run, case)
        for judged in [*self._court.receive(), *self._court.check_time()]:
            self._take(self._judged_for.pop(judged.key), judged.key, judged.verdict)
        return self.workshop.receive()

    def _judge(self, run: StepRun, case: Case) -> None:
        rollout = case.rollout
        if rollout.num_tokens == 0:
            # Nothing to ask anybody about.
            self._take(run, rollout.key, RewardResult(rollout=rollout))
            return
        self._judged_for[rollout.key] = run
        self._court.add(case)

    def _take(self, run: StepRun, key: RolloutKey, verdict: RewardResult) -> None:
        following = run.collection.take(verdict)
        self._fleet.note_judged(run, key, following)
        if following is not None:
            return
        run.note_over(verdict.rollout)
        if self._on_over is not None and self._on_over(verdict.rollout):
            self._fleet.refresh()

    def _finished(self, run: StepRun, done: TrainedStep, sent_s: float) -> Finished:
        del self._runs[run.step]
        now = time.perf_counter()
        elapsed_s, busy_s = now - self._step_since_s, self._fleet.busy_s
        wait_s = sent_s - self._idle_since_s
        self._idle_since_s = self._step_since_s = now
        self._fleet.busy_s = 0.0
        bubble = max(0.0, 1.0 - busy_s / (elapsed_s * self._fleet.num_workers))
        times, self._fleet.times = self._fleet.times, PassTimes()
        times.note_training(done.train_s + done.update_s)
        label = self.labels[run.version]
        return Finished(run=run, done=done, label=label, trainer_wait_s=wait_s, bubble=bubble, times=times)
