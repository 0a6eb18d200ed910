"""The event loop of a run: receives messages from the child processes and sends each its next work."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from treering.engine.rollout import Rollout, RolloutKey
from treering.rl.environments.run import Run
from treering.rl.reward_results import RewardResult
from treering.rl.step_report import WorkerSpan
from treering.runtime.ipc.launcher import Launcher, wait_for_any
from treering.runtime.ipc.messages import RewardRequest, TrainedStep
from treering.runtime.ipc.process import ChildProcess
from treering.runtime.ipc.weight_store import WeightStore
from treering.runtime.pools.reward_client import RewardClient
from treering.runtime.pools.rollout_pool import RolloutPool
from treering.runtime.pools.trainer_client import TrainerClient
from treering.runtime.step.open_step import OpenStep
from treering.schedule.measured_latency import PassTimes
from treering.train.progress import OnProgress, PhaseProgress

_POLL_S = 1.0
"""Longest wait for a message: a death that closes no pipe is noticed after this time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedStep:
    """A step that is sampled, rewarded and trained.

    Attributes:
        open_step: its rollouts.
        done: the trainer's report.
        policy_version: the version that sampled it.
        trainer_wait_s: how long the trainer was idle before it.
        bubble: idle fraction of the workers' time since the previous step.
        times: of forward passes and weight loads since the previous step, and of its update.
        spans: of the workers that had a share of it, and of the trainer.
    """

    open_step: OpenStep
    done: TrainedStep
    policy_version: int
    trainer_wait_s: float
    bubble: float
    times: PassTimes
    spans: tuple[WorkerSpan, ...]


class Controller:
    """Runs the rollout workers, the reward worker and the trainer of one run.

    Example: with the steps 4 and 5 open, `finish(4, print)` returns once 4 is trained; 5 is sampled meanwhile.
    """

    def __init__(
        self,
        rollout_pool: RolloutPool,
        reward_client: RewardClient | None,
        trainer_client: TrainerClient,
        store: WeightStore,
        launcher: Launcher,
        *,
        policy_versions: Mapping[int, int],
        on_finished: Callable[[Rollout], bool] | None,
    ) -> None:
        """Takes clients whose processes are started.

        Args:
            rollout_pool: the rollout workers.
            reward_client: the reward worker; None where episodes bring their rewards.
            trainer_client: the trainer.
            store: the weights.
            launcher: started the processes; `close` closes it.
            policy_versions: step -> policy version after it, of the weights in the store.
            on_finished: called with each finished rollout; returns whether the workers must refresh their history.
        """
        self._rollout_pool = rollout_pool
        self._reward_client = reward_client
        self.trainer_client = trainer_client
        self.store = store
        self._launcher = launcher
        self.policy_versions = dict(policy_versions)
        self._on_finished = on_finished
        self._open_steps: dict[int, OpenStep] = {}
        self._pending_rewards: dict[RolloutKey, tuple[OpenStep, RewardRequest]] = {}
        self._idle_since_s = self._step_since_s = time.perf_counter()

    @property
    def children(self) -> list[ChildProcess]:
        """All child processes."""
        return [*self._needed, *([] if self._reward_client is None else [self._reward_client.spare])]

    @property
    def _needed(self) -> list[ChildProcess]:
        rewards = [] if self._reward_client is None else [self._reward_client.child]
        return [*self._rollout_pool.children, *rewards, *self.trainer_client.children]

    @property
    def last_open(self) -> int:
        """The latest step that is being sampled; 0 if none is."""
        return max(self._open_steps, default=0)

    def wait_until_ready(self, on_progress: OnProgress | None = None) -> None:
        """Waits until every process but the spare one has built its model or task, and starts the clock.

        `on_progress` is called with those that have, and all of them.

        Raises:
            StateError, Exception: see `finish`.
        """
        progress = PhaseProgress("starting", len(self._needed), on_progress)
        while (num_ready := sum(child.is_ready for child in self._needed)) < len(self._needed):
            progress.reach(num_ready)
            progress.tick()
            self._receive()
        progress.reach(num_ready)
        self._idle_since_s = self._step_since_s = time.perf_counter()

    def open(self, open_step: OpenStep) -> None:
        """Starts sampling the next step."""
        self._open_steps[open_step.step] = open_step

    def dispatch(self) -> None:
        """Sends every process the work that it can start now."""
        self._rollout_pool.dispatch(self._open_steps, self.policy_versions)
        if self._reward_client is not None:
            self._reward_client.dispatch()

    def finish(
        self, step: int, on_sampled: Callable[[OpenStep], None], on_progress: OnProgress | None = None
    ) -> FinishedStep:
        """Runs until the earliest open step is trained.

        Args:
            step: its number.
            on_sampled: called with the step while it is trained, so that the trainer does not wait for it.
            on_progress: called with its rollouts that have their reward, and all of them.

        Raises:
            StateError: a process dies repeatedly, rewards end their process again and again, or too many episodes of
                an environment failed.
            Exception: the error that a child process raised.
        """
        open_step, sent_s = self._open_steps[step], None
        progress = PhaseProgress("sampling", open_step.account.scheduled, on_progress)
        while True:
            self.dispatch()
            progress.reach(open_step.account.scheduled - open_step.collection.num_open)
            if sent_s is None:
                progress.tick()
            if sent_s is None and open_step.is_complete:
                self.trainer_client.train(step, open_step.collection.result().groups)
                sent_s = time.perf_counter()
                on_sampled(open_step)
            done = self._receive()
            if done is not None:
                assert sent_s is not None, "a step is trained after it was sent"
                return self._finished(open_step, done, sent_s)

    def announce(self, version: int, policy_version: int) -> None:
        """Makes new weights available to the workers; those whose slot they overwrote are forgotten."""
        self.policy_versions[version] = policy_version
        self.policy_versions = {
            known: updates for known, updates in self.policy_versions.items() if known > version - self.store.num_slots
        }

    def close(self) -> None:
        """Stops all processes."""
        self._rollout_pool.close()
        if self._reward_client is not None:
            self._reward_client.close()
        self.trainer_client.close()
        self.store.close()
        self._launcher.close()

    def _receive(self) -> TrainedStep | None:
        """Waits for messages and handles them; returns the trained step if there is one."""
        rewards = self._reward_client
        left_s = None if rewards is None else rewards.seconds_left()
        connections = [*self._rollout_pool.connections(), *self.trainer_client.connections()]
        connections += [] if rewards is None else rewards.connections()
        wait_for_any(connections, _POLL_S if left_s is None else min(_POLL_S, left_s))
        for open_step, ended in self._rollout_pool.receive(self._open_steps):
            if isinstance(ended, Run):
                self._take_run(open_step, ended)
            else:
                self._request_reward(open_step, ended)
        if rewards is not None:
            self._take_rewards(rewards)
        return self.trainer_client.receive()

    def _take_rewards(self, rewards: RewardClient) -> None:
        for reply in [*rewards.receive(), *rewards.check_time()]:
            open_step, request = self._pending_rewards.pop(reply.key)
            if request.is_group:
                self._take_group(open_step, reply.results)
            else:
                self._take(open_step, *reply.results)

    def _take_run(self, open_step: OpenStep, run: Run) -> None:
        open_step.runs.take(run)
        open_step.note_finished(run.key, run.num_sampled)
        open_step.note_rewarded(1)
        for rollout in run.rollouts:
            self._remember(rollout)

    def _remember(self, rollout: Rollout) -> None:
        if self._on_finished is not None and self._on_finished(rollout):
            self._rollout_pool.refresh()

    def _request_reward(self, open_step: OpenStep, rollout: Rollout) -> None:
        if rollout.num_tokens == 0:
            # An empty rollout needs no reward.
            self._take(open_step, RewardResult(rollout=rollout))
            return
        self._add(open_step, RewardRequest(rollouts=[rollout]))

    def _add(self, open_step: OpenStep, request: RewardRequest) -> None:
        assert self._reward_client is not None, "rollouts have rewards"
        self._pending_rewards[request.key] = open_step, request
        self._reward_client.add(request)

    def _take(self, open_step: OpenStep, result: RewardResult) -> None:
        open_step.rollouts.take(result)
        open_step.note_finished(result.rollout.key, result.rollout.num_tokens)
        if not result.awaits_group:
            open_step.note_rewarded(1)
        self._remember(result.rollout)
        if group := open_step.rollouts.full_group(result.rollout.prompt_id):
            self._add(open_step, RewardRequest(rollouts=group, is_group=True))

    def _take_group(self, open_step: OpenStep, results: Sequence[RewardResult]) -> None:
        for result in results:
            open_step.rollouts.take(result)
        open_step.note_rewarded(len(results))

    def _finished(self, open_step: OpenStep, done: TrainedStep, sent_s: float) -> FinishedStep:
        del self._open_steps[open_step.step]
        now = time.perf_counter()
        elapsed_s, busy_s = now - self._step_since_s, self._rollout_pool.busy_s
        wait_s = sent_s - self._idle_since_s
        self._idle_since_s = self._step_since_s = now
        self._rollout_pool.busy_s = 0.0
        bubble = max(0.0, 1.0 - busy_s / (elapsed_s * self._rollout_pool.num_workers))
        times, self._rollout_pool.times = self._rollout_pool.times, PassTimes()
        times.note_training(done.train_s + done.update_s)
        policy_version = self.policy_versions[open_step.version]
        return FinishedStep(
            open_step=open_step,
            done=done,
            policy_version=policy_version,
            trainer_wait_s=wait_s,
            bubble=bubble,
            times=times,
            spans=(*(open_step.spans[worker] for worker in sorted(open_step.spans)), _trainer_span(done, now - sent_s)),
        )


def _trainer_span(done: TrainedStep, elapsed_s: float) -> WorkerSpan:
    """The span of the trainer, which got the step `elapsed_s` ago."""
    now = time.time()
    return WorkerSpan(
        worker=None, started_s=now - elapsed_s, ended_s=now, busy_s=done.train_s + done.update_s, num_rollouts=0
    )
