"""Run the event loop of a run: start its processes, receive their messages, and send each its next work."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from treering.config.optim import OptimOptions
from treering.config.rl_options import RlOptions
from treering.engine.protocol import Request, Rollout, RolloutKey
from treering.errors import ConfigError
from treering.rl.collect import RewardResult
from treering.rl.drafting import Drafting
from treering.rl.environments.environment import EnvironmentTask
from treering.rl.environments.episodes import Run
from treering.rl.step_report import WorkerSpan
from treering.rl.tasks.task import Task
from treering.runtime.account import Account
from treering.runtime.messages import Recipe, RewardRequest, TrainedStep, TrainerSettings, WorkerSettings
from treering.runtime.open_step import OpenStep
from treering.runtime.process import Actors, RunProcess
from treering.runtime.rewards import RewardClient
from treering.runtime.rollout_pool import RolloutPool
from treering.runtime.trainer_worker import TrainerClient, packed
from treering.runtime.weight_store import WeightStore, model_tensors
from treering.schedule.cluster import Cluster
from treering.schedule.measured_latency import MeasuredTimes
from treering.schedule.policy import SchedulePolicy
from treering.schedule.predict import LengthPredictor
from treering.train.loop.other_models import MakeReference
from treering.train.progress import OnProgress, PhaseProgress

_POLL_S = 1.0
"""Longest wait for a message, after which silent processes are noticed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineSpec:
    """Settings of a run that samples and trains in several processes.

    Raises:
        ConfigError: for a time limit that is not positive, no trainer rank, dynamic sampling, or a history in memory.
    """

    recipe: Recipe
    """Builds model, task and engines in the processes."""
    optim: OptimOptions
    """Options of the optimiser."""
    options: RlOptions
    """Options of the steps, as for `RlLoop`."""
    num_steps: int
    """Steps of the whole run; no later step is sampled."""
    cluster: Cluster
    """Workers and staleness; policies also read its slots, and its latency until one is measured."""
    policy: SchedulePolicy
    """An unused scheduling policy."""
    predictor: LengthPredictor
    """An unused length predictor."""
    actors: Actors
    """Starts the processes."""
    drafting: Drafting | None = None
    """History of earlier rollouts, in a folder that all hosts see; None disables speculation."""
    num_trainer_ranks: int = 1
    """Processes that train together, each with a shard of the model (FSDP2)."""
    reward_time_limit_s: float = 60.0
    """Time limit for one reward; a rollout that exceeds it is dropped."""
    worker_time_limit_s: float = 3600.0
    """Seconds that a process with work may be silent before it is replaced."""
    reference: MakeReference | None = None
    """Makes the reference model, as for `RlLoop`; a trainer calls it, so it must be picklable."""

    def __post_init__(self) -> None:
        if self.options.max_gen_batches > 1:
            raise ConfigError(
                f"max_gen_batches must be 1 with workers, got {self.options.max_gen_batches}: it lets a step's rewards "
                "decide what is sampled next, and workers sample ahead; set 1, or use RlLoop"
            )
        if self.num_trainer_ranks < 1:
            raise ConfigError(f"num_trainer_ranks must be at least 1, got {self.num_trainer_ranks}; raise it")
        if not self.reward_time_limit_s > 0:
            raise ConfigError(f"reward_time_limit_s must be positive, got {self.reward_time_limit_s}; raise it")
        if not self.worker_time_limit_s > 0:
            raise ConfigError(f"worker_time_limit_s must be positive, got {self.worker_time_limit_s}; raise it")
        if self.drafting is not None and self.drafting.folder is None:
            raise ConfigError(
                "workers read the history from a folder, but Drafting(folder=None) keeps it in memory; set a folder"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StartState:
    """Point where a run starts or resumes; the weights are passed separately, as a model."""

    step: int = 0
    """Number of steps done."""
    policy_version: int = 0
    """Number of updates done."""
    optimizer: Mapping[str, Any] | None = None
    """State of the optimiser; None starts a new one."""
    past: tuple[Mapping[str, Any], ...] = ()
    """Earlier weights that the next steps are sampled with: "step", "policy_version" and "weights" by name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedStep:
    """Step that is sampled, rewarded and trained.

    Attributes:
        open_step: its rollouts.
        done: the trainer's report.
        policy_version: the version that sampled it.
        trainer_wait_s: seconds that the trainer was idle before it.
        bubble: idle fraction of the workers' time since the previous step.
        times: forward passes and weight loads since the previous step, and its update.
        spans: one for each worker that had a share of it, and one for the trainer.
    """

    open_step: OpenStep
    done: TrainedStep
    policy_version: int
    trainer_wait_s: float
    bubble: float
    times: MeasuredTimes
    spans: tuple[WorkerSpan, ...]


class Controller:
    """Runner of the rollout workers, the reward worker and the trainer of one run.

    Example: with steps 4 and 5 open, `finish(4, print)` returns once 4 is trained; 5 is sampled meanwhile.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        start_state: StartState,
        model: nn.Module,
        task: Task,
        *,
        account: Account,
        on_finished: Callable[[Rollout], bool] | None,
        early_requests: Callable[[int], Sequence[Sequence[Request]] | None] = lambda _: None,
    ) -> None:
        """Start every process; `wait_until_ready` waits for them and raises their errors.

        Args:
            spec: the run.
            start_state: where it starts.
            model: its weights.
            task: the task; rewards have their own process, unless an environment's episodes bring them.
            account: counts deaths.
            on_finished: called with each finished rollout; returns whether the workers must refresh their history.
            early_requests: returns the requests of a later step by worker, for idle rows, or None.
        """
        self._actors, self._on_finished, self._early_requests = spec.actors, on_finished, early_requests
        self._actors.open(spec.recipe)
        self.store = WeightStore(self._actors, spec.cluster.staleness + 2)
        for past in start_state.past:
            self.store.put(past["step"], past["weights"])
        weights = self.store.put(start_state.step, model_tensors(model))
        self.policy_versions = {past["step"]: past["policy_version"] for past in start_state.past}
        """Policy version after each step whose weights are in the store."""
        self.policy_versions[start_state.step] = start_state.policy_version
        runs_episodes = isinstance(task, EnvironmentTask)
        drafting = spec.drafting
        self._rollout_pool = RolloutPool(
            WorkerSettings(
                recipe=spec.recipe,
                drafts=None if drafting is None else drafting.options,
                history=None if drafting is None else drafting.folder,
                rehearse=spec.options.rehearse,
            ),
            self._actors,
            self.store,
            num_workers=spec.cluster.num_workers,
            time_limit_s=spec.worker_time_limit_s,
            account=account,
            runs_episodes=runs_episodes,
        )
        self._reward_client: RewardClient | None = None
        if not runs_episodes:
            self._reward_client = RewardClient(
                spec.recipe,
                self._actors,
                reward_name=task.reward_name,
                time_limit_s=spec.reward_time_limit_s,
                worker_time_limit_s=spec.worker_time_limit_s,
                account=account,
            )
        self.trainer_client = TrainerClient(
            TrainerSettings(
                recipe=spec.recipe,
                optim=spec.optim,
                options=spec.options,
                state=packed(start_state.optimizer),
                reference=spec.reference,
                weights=weights,
            ),
            self.store,
            self._actors,
            num_ranks=spec.num_trainer_ranks,
            time_limit_s=spec.worker_time_limit_s,
            account=account,
        )
        self._open_steps: dict[int, OpenStep] = {}
        self._pending_rewards: dict[RolloutKey, tuple[OpenStep, RewardRequest]] = {}
        self._idle_since_s = self._step_since_s = time.perf_counter()

    @property
    def processes(self) -> list[RunProcess]:
        """All processes of the run."""
        rewards = [] if self._reward_client is None else [self._reward_client.process]
        return [*self._rollout_pool.processes, *rewards, *self.trainer_client.processes]

    @property
    def last_open(self) -> int:
        """The latest step that is being sampled; 0 if there is none."""
        return max(self._open_steps, default=0)

    def wait_until_ready(self, on_progress: OnProgress | None = None) -> None:
        """Wait until every process has built its model or task, and start the clock.

        `on_progress` is called with the number of ready processes and the number of all.

        Raises:
            StateError, Exception: as in `finish`.
        """
        progress = PhaseProgress("starting", len(self.processes), on_progress)
        while (num_ready := sum(process.is_ready for process in self.processes)) < len(self.processes):
            progress.reach(num_ready)
            progress.tick()
            self._receive()
        progress.reach(num_ready)
        self._idle_since_s = self._step_since_s = time.perf_counter()

    def open(self, open_step: OpenStep) -> None:
        """Start sampling the next step."""
        self._open_steps[open_step.step] = open_step

    def dispatch(self) -> None:
        """Send every process the work that it can start now."""
        self._rollout_pool.dispatch(self._open_steps, self.policy_versions)
        early = self._early_requests(self.last_open + 1) if self._open_steps else None
        if early is not None:
            self._rollout_pool.rehearse(early, self.last_open + 1, self._open_steps)

    def finish(
        self, step: int, on_sampled: Callable[[OpenStep], None], on_progress: OnProgress | None = None
    ) -> FinishedStep:
        """Run until the earliest open step is trained.

        Args:
            step: its number.
            on_sampled: called with the step while it is trained, so that the trainer does not wait for it.
            on_progress: called with the number of rewarded rollouts of the step and the number of all.

        Raises:
            StateError: if a process dies repeatedly, rewards repeatedly end their process, or too many episodes of an
                environment failed.
            Exception: the error that a process raised.
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
                # The next step is scheduled now, so workers can rehearse it.
                self.dispatch()
            done = self._receive()
            if done is not None:
                assert sent_s is not None, "a step is trained after it was sent"
                return self._finished(open_step, done, sent_s)

    def announce(self, version: int, policy_version: int) -> None:
        """Make new weights available to the workers and forget those whose slot they overwrote."""
        self.policy_versions[version] = policy_version
        self.policy_versions = {
            known: updates for known, updates in self.policy_versions.items() if known > version - self.store.num_slots
        }

    def close(self) -> None:
        """Stop all processes."""
        self._rollout_pool.close()
        if self._reward_client is not None:
            self._reward_client.close()
        self.trainer_client.close()
        self._actors.close()

    def _receive(self) -> TrainedStep | None:
        """Wait for messages and handle them; return the trained step if there is one."""
        rewards = self._reward_client
        left_s = None if rewards is None else rewards.seconds_left()
        actors = [process.actor for process in self.processes if process.actor is not None]
        self._actors.wait(actors, _POLL_S if left_s is None else min(_POLL_S, left_s))
        for open_step, ended in self._rollout_pool.receive(self._open_steps):
            if isinstance(ended, Run):
                self._take_run(open_step, ended)
            else:
                self._request_reward(open_step, ended)
        if rewards is not None:
            self._take_rewards(rewards)
        return self.trainer_client.receive()

    def _take_rewards(self, rewards: RewardClient) -> None:
        for reply in rewards.receive():
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
        times, self._rollout_pool.times = self._rollout_pool.times, MeasuredTimes()
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
    """Return the trainer's span for a step that it got `elapsed_s` seconds ago."""
    now = time.time()
    return WorkerSpan(
        worker=None, started_s=now - elapsed_s, ended_s=now, busy_s=done.train_s + done.update_s, num_rollouts=0
    )
