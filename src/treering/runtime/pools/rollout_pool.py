"""The controller's client of the rollout workers: hands out requests and recovers those of a dead worker."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from treering.engine.request import Request
from treering.engine.rollout import Rollout, RolloutKey
from treering.history.store.snapshot import SnapshotSource
from treering.rl.environments.run import Run
from treering.runtime.account import Account
from treering.runtime.ipc.launcher import Launcher, Transport
from treering.runtime.ipc.messages import CloseEnvironment, EndedWork, GiveUp, ReportReceived, WorkerSettings
from treering.runtime.ipc.process import ChildProcess
from treering.runtime.pools.worker_state import OpenSteps, SentHistory, WorkerState
from treering.runtime.step.migration import choose_move
from treering.runtime.step.open_step import OpenStep
from treering.runtime.workers.episode_worker import run_episode_worker
from treering.runtime.workers.rollout_worker import run_rollout_worker
from treering.schedule.measured_latency import PassTimes

_CLOSE_S = 5.0
"""How long environments may take to end what they have started."""


class RolloutPool:
    """The rollout workers, each in its own step.

    A worker starts the next step when it has nothing left in its own and the weights are available; it never waits for
    other workers. Call `receive` when a connection is ready, and `dispatch` after every event.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        launcher: Launcher,
        *,
        num_workers: int,
        time_limit_s: float,
        account: Account,
        history: SnapshotSource | None = None,
        runs_episodes: bool = False,
    ) -> None:
        """Starts the workers; each may be silent for `time_limit_s` while it has rollouts.

        They are sent the `history` as it is published, by prompt; None: they read a folder, or none. With
        `runs_episodes` each runs those of an environment, and closes it in the end.
        """
        self._settings = settings
        self._runs_episodes = runs_episodes
        self._history = history
        self._keeps_others = settings.drafts is not None and "others" in settings.drafts.sources
        self._max_batch = settings.recipe.max_batch
        self._account = account
        self._workers = [
            WorkerState(
                child=ChildProcess(
                    f"rollout worker {number}",
                    "rollout_worker",
                    run_episode_worker if runs_episodes else run_rollout_worker,
                    launcher,
                    time_limit_s=time_limit_s,
                    leads_group=runs_episodes,
                ),
                sent=self._nothing_sent(),
            )
            for number in range(num_workers)
        ]
        self.busy_s = 0.0
        self.times = PassTimes()
        for worker in self._workers:
            worker.child.start(settings)

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self._workers)

    @property
    def children(self) -> list[ChildProcess]:
        """Their child processes."""
        return [worker.child for worker in self._workers]

    def connections(self) -> list[Transport]:
        """Connections to wait for."""
        return [worker.child.connection for worker in self._workers]

    def dispatch(self, open_steps: OpenSteps, policy_versions: Mapping[int, int]) -> None:
        """Sends every worker the requests that it can start now.

        Args:
            open_steps: the open steps.
            policy_versions: step -> policy version after it, of the weights in the store.
        """
        # Those with the fewest rollouts choose first from the unassigned requests. A worker that is on its way, perhaps
        # for a minute, would only keep requests from others.
        ready = [number for number, worker in enumerate(self._workers) if worker.child.is_ready]
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
                worker.begin(open_step, policy_versions[open_step.version])
            worker.submit(requests)
        for number, worker in enumerate(self._workers):
            if worker.has_report:
                worker.has_report = False
                self._move(number, worker, open_steps, policy_versions)

    def receive(self, open_steps: OpenSteps) -> list[tuple[OpenStep, Rollout | Run]]:
        """Finished rollouts and runs, each with its step. Replaces dead workers.

        Raises:
            StateError: a worker dies repeatedly.
            Exception: the error that a worker raised.
        """
        found: list[tuple[OpenStep, Rollout | Run]] = []
        for number, worker in enumerate(self._workers):
            messages, has_died = worker.child.receive()
            for message in messages:
                found += self._take(number, worker, message, open_steps)
            worker.child.end_if_silent(is_busy=bool(worker.running))
            if has_died:
                self._replace(number, worker, open_steps)
        return found

    def refresh(self) -> None:
        """Gives the workers within the step what was published of the history."""
        for worker in self._workers:
            worker.refresh()

    def close(self) -> None:
        """Stops the workers."""
        if self._runs_episodes:
            for worker in self._workers:
                worker.child.send(CloseEnvironment())
        for worker in self._workers:
            worker.child.stop(patience_s=_CLOSE_S if self._runs_episodes and worker.child.is_ready else 0.0)

    def _take(
        self, number: int, worker: WorkerState, message: EndedWork, open_steps: OpenSteps
    ) -> list[tuple[OpenStep, Rollout | Run]]:
        self.busy_s += message.busy_s
        self.times.add(message.times)
        open_step = open_steps.get(message.step)
        if message.given is not None:
            self._hand_over(worker, message.given, open_step)
        if open_step is None:
            # The answer to `GiveUp` came after the end of its step, with nothing left to give.
            assert not message.ended, "a step ends after its rollouts"
            return []
        open_step.note_stats(message.stats)
        open_step.note_span(number, busy_s=message.busy_s, num_rollouts=len(message.ended))
        self._note_progress(worker, message.progress, open_step)
        if message.ended:
            # Only finished rollouts count as progress: a worker may die at the same token every time.
            worker.child.note_progress()
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
        worker.child.send(ReportReceived())

    def _move(
        self, number: int, worker: WorkerState, open_steps: OpenSteps, policy_versions: Mapping[int, int]
    ) -> None:
        """Requests that a worker gives up rollouts, if a move saves time. One move at a time in each step."""
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
            worker.child.send(GiveUp(keys=move.keys))

    def _hand_over(self, worker: WorkerState, given: Sequence[Rollout], open_step: OpenStep | None) -> None:
        """Moves given-up rollouts to the target, or back to their worker if the target has left the step."""
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
        worker.child.reap()
        if worker.step in open_steps:
            open_steps[worker.step].requeue(worker.running.values())
            open_steps[worker.step].release(number)
        self._workers[number] = WorkerState(child=worker.child, sent=self._nothing_sent())
        worker.child.start(self._settings)

    def _nothing_sent(self) -> SentHistory | None:
        """What a new process was sent."""
        return None if self._history is None else SentHistory(self._history, keeps_others=self._keeps_others)


def _has_later_work(
    number: int, open_step: OpenStep, open_steps: OpenSteps, policy_versions: Mapping[int, int]
) -> bool:
    """Whether a later step could start on a worker if it were idle."""
    return any(
        step > open_step.step and later.version in policy_versions and later.has_work(number)
        for step, later in open_steps.items()
    )
