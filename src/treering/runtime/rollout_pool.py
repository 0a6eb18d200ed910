"""Give requests to the rollout workers, and recover those of a dead worker; this is the controller's side."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from treering.engine.protocol import Request, Rollout, RolloutKey
from treering.rl.environments.episodes import CLEAN_UP_S, Run
from treering.runtime.account import Account
from treering.runtime.messages import (
    BeginStep,
    CloseEnvironment,
    EndedWork,
    GiveUp,
    RefreshHistory,
    RehearseRequests,
    ReportReceived,
    SampleRequests,
    Work,
    WorkerSettings,
)
from treering.runtime.moves import choose_move
from treering.runtime.open_step import OpenStep
from treering.runtime.process import Actors, RunProcess
from treering.runtime.rollout_worker import EpisodeWorker, RolloutWorker
from treering.runtime.weight_store import WeightStore
from treering.schedule.measured_latency import MeasuredTimes

OpenSteps: TypeAlias = Mapping[int, OpenStep]
"""Steps that are being sampled, by number, in order."""


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerState:
    """State of a rollout worker as the controller knows it.

    Example: `WorkerState(process=process)` is a process that has just started; it has no step and no rollouts.
    """

    process: RunProcess
    step: int = 0
    """Current step; 0 for a new worker."""
    rehearsed: int = 0
    """The latest step that it was asked to rehearse."""
    running: dict[RolloutKey, Work] = field(default_factory=dict)
    move_target: int | None = None
    """Worker that takes over the rollouts that this one must give up; None once this one has answered."""
    has_report: bool = False
    """Whether it has reported progress since moves were last considered."""
    num_ended: int = 0
    """Rollouts finished since it was last sent requests."""
    pace: int = 0
    """The most rollouts that recently finished between two dispatches."""

    def num_spare(self, max_batch: int) -> int:
        """Return how many requests to queue in its engine: twice those finishing between two dispatches, or a few."""
        return min(max(2 * self.pace, max_batch // 4, 1), max_batch)

    def next_step(self, number: int, open_steps: OpenSteps) -> OpenStep | None:
        """Return its current step while it has rollouts there, else the next step with work for worker `number`."""
        if self.running:
            return open_steps.get(self.step)
        return next(
            (
                open_step
                for step, open_step in sorted(open_steps.items())
                if step >= self.step and open_step.has_work(number)
            ),
            None,
        )

    def begin(self, open_step: OpenStep, policy_version: int, weights: object) -> None:
        """Start a step on the worker, before its first requests."""
        self.step = open_step.step
        self.process.send(
            BeginStep(
                step=open_step.step,
                weights=weights,
                policy_version=policy_version,
                reports=open_step.moving != "off",
            )
        )

    def submit(self, requests: Sequence[Work]) -> None:
        """Send requests to the worker."""
        self.running.update((request.key, request) for request in requests)
        self.process.send(SampleRequests(requests=requests))


_CLOSE_S = 5.0
"""Seconds that environments get to end what they have started, after their episodes have cleaned up."""


class RolloutPool:
    """Rollout workers, each in its own step.

    A worker starts the next step when its own has no work left for it and the weights are available; it never waits
    for other workers. Call `receive` when a message is ready, and `dispatch` after every event.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        actors: Actors,
        store: WeightStore,
        *,
        num_workers: int,
        time_limit_s: float,
        account: Account,
        runs_episodes: bool = False,
    ) -> None:
        """Start the workers; each may be silent for `time_limit_s` while it has rollouts.

        Their weights come from `store`. With `runs_episodes`, each runs the episodes of an environment and closes it at
        the end.
        """
        self._settings, self._store = settings, store
        self._runs_episodes = runs_episodes
        self._max_batch = settings.recipe.max_batch
        self._account = account
        role = EpisodeWorker if runs_episodes else RolloutWorker
        names = [f"rollout worker {number}" for number in range(num_workers)]
        self.processes = [RunProcess(name, "rollout_worker", role, actors, time_limit_s=time_limit_s) for name in names]
        self._workers = [WorkerState(process=process) for process in self.processes]
        self.busy_s = 0.0
        self.times = MeasuredTimes()
        for process in self.processes:
            process.start(settings)

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self._workers)

    def dispatch(self, open_steps: OpenSteps, policy_versions: Mapping[int, int]) -> None:
        """Send every worker the requests that it can start now.

        Args:
            open_steps: the open steps.
            policy_versions: policy version after each step whose weights are in the store.
        """
        # Workers with the fewest rollouts choose first from the unassigned requests. A worker that is still starting,
        # perhaps for a minute, would only keep requests from the others.
        ready = [number for number, worker in enumerate(self._workers) if worker.process.is_ready]
        order = sorted(ready, key=lambda number: len(self._workers[number].running))
        for number in order:
            worker = self._workers[number]
            open_step = worker.next_step(number, open_steps)
            if open_step is None or open_step.version not in policy_versions:
                continue
            if worker.num_ended:
                worker.pace, worker.num_ended = max(worker.num_ended, worker.pace - 1), 0
            spare = worker.num_spare(self._max_batch)
            requests = open_step.take(
                number, num_running=len(worker.running), max_batch=self._max_batch, num_spare=spare
            )
            if not requests:
                continue
            if worker.step != open_step.step:
                weights = self._store.ref(open_step.version)
                worker.begin(open_step, policy_versions[open_step.version], weights)
            worker.submit(requests)
        for number, worker in enumerate(self._workers):
            if worker.has_report:
                worker.has_report = False
                self._move(number, worker, open_steps, policy_versions)

    def rehearse(self, early: Sequence[Sequence[Request]], step: int, open_steps: OpenSteps) -> None:
        """Send each worker for which no work is left in the open steps its requests of a later step, once.

        Args:
            early: requests by worker.
            step: their step.
            open_steps: the open steps.
        """
        for number, worker in enumerate(self._workers):
            has_begun = worker.process.is_ready and worker.step > 0
            if not has_begun or worker.rehearsed == step or any(each.has_work(number) for each in open_steps.values()):
                continue
            worker.rehearsed = step
            worker.process.send(RehearseRequests(requests=early[number]))

    def receive(self, open_steps: OpenSteps) -> list[tuple[OpenStep, Rollout | Run]]:
        """Return finished rollouts and runs, each with its step, and replace dead workers.

        Raises:
            StateError: if a worker dies repeatedly.
            Exception: the error that a worker raised.
        """
        found: list[tuple[OpenStep, Rollout | Run]] = []
        for number, worker in enumerate(self._workers):
            messages, has_died = worker.process.receive()
            for message in messages:
                found += self._take(number, worker, message, open_steps)
            worker.process.end_if_silent(is_busy=bool(worker.running))
            if has_died:
                self._replace(number, worker, open_steps)
        return found

    def refresh(self) -> None:
        """Make the workers read history that was published within the step."""
        for process in self.processes:
            process.send(RefreshHistory())

    def close(self) -> None:
        """Stop the workers, after environments had time to end what they have started."""
        if self._runs_episodes:
            ready = [process for process in self.processes if process.is_ready]
            for process in ready:
                process.send(CloseEnvironment())
            end_s = time.monotonic() + CLEAN_UP_S + _CLOSE_S
            for process in ready:
                process.wait_until_closed(end_s)
        for process in self.processes:
            process.stop()

    def _take(
        self, number: int, worker: WorkerState, message: EndedWork, open_steps: OpenSteps
    ) -> list[tuple[OpenStep, Rollout | Run]]:
        self.busy_s += message.busy_s
        self.times.add(message.times)
        open_step = open_steps.get(message.step)
        if message.given is not None:
            self._hand_over(worker, message.given, open_step)
        if open_step is None:
            # The answer to `GiveUp` came after the end of its step, so nothing was left to give.
            assert not message.ended, "a step ends after its rollouts"
            return []
        open_step.note_stats(message.stats)
        open_step.note_span(number, busy_s=message.busy_s, num_rollouts=len(message.ended))
        self._note_progress(worker, message.progress, open_step)
        if message.ended:
            # Only finished rollouts count as progress, because a worker may die at the same token every time.
            worker.process.note_progress()
        worker.num_ended += len(message.ended)
        for each in message.ended:
            del worker.running[each.key]
        return [(open_step, each) for each in message.ended]

    def _note_progress(self, worker: WorkerState, progress: Mapping[RolloutKey, int], open_step: OpenStep) -> None:
        if not progress:
            return
        for key, num_tokens in progress.items():
            open_step.note_progress(key, num_tokens)
        worker.has_report = True
        worker.process.send(ReportReceived())

    def _move(
        self, number: int, worker: WorkerState, open_steps: OpenSteps, policy_versions: Mapping[int, int]
    ) -> None:
        """Ask a worker to give up rollouts if a move saves time; each step has one move at a time."""
        open_step = open_steps.get(worker.step)
        if open_step is None or open_step.prices is None or open_step.moving == "off":
            return
        if any(each.step == worker.step and each.move_target is not None for each in self._workers):
            return
        if open_step.moving == "consolidate" and not _has_later_work(number, open_step, open_steps, policy_versions):
            return
        held = [each.running if each.step == worker.step else {} for each in self._workers]
        move = choose_move(open_step, open_step.prices, held, number)
        if move is not None:
            worker.move_target = move.target
            worker.process.send(GiveUp(keys=move.keys))

    def _hand_over(self, worker: WorkerState, given: Sequence[Rollout], open_step: OpenStep | None) -> None:
        """Move given-up rollouts to the target, or back to their worker if the target has left the step."""
        assert worker.move_target is not None, "workers give up only what was requested"
        target, worker.move_target = worker.move_target, None
        for rollout in given:
            assert open_step is not None, "a given-up rollout keeps its step open"
            request = worker.running.pop(rollout.key)
            assert isinstance(request, Request), "episodes are never given up"
            before = 0 if request.so_far is None else request.so_far.num_tokens
            if rollout.num_tokens > before:
                request = replace(request, so_far=rollout)
            if self._workers[target].step == open_step.step:
                open_step.move(request, target)
            else:
                open_step.resume(request, self._workers.index(worker))

    def _replace(self, number: int, worker: WorkerState, open_steps: OpenSteps) -> None:
        self._account.worker_deaths += 1
        worker.process.reap()
        if worker.step in open_steps:
            open_steps[worker.step].requeue(worker.running.values())
            open_steps[worker.step].release(number)
        self._workers[number] = WorkerState(process=worker.process)
        worker.process.start(self._settings)


def _has_later_work(
    number: int, open_step: OpenStep, open_steps: OpenSteps, policy_versions: Mapping[int, int]
) -> bool:
    """Return whether a later step could start on a worker if it were idle."""
    return any(
        step > open_step.step and later.version in policy_versions and later.has_work(number)
        for step, later in open_steps.items()
    )
