"""Track the progress of a run: steps done and open, prompts, assignments, policy version and account."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from treering.data import Trajectory
from treering.engine.protocol import Request, RolloutKey
from treering.errors import StateError
from treering.rl.collect import Collection, Group
from treering.rl.environments.collect_episodes import EpisodeCollection
from treering.rl.environments.environment import EnvironmentTask
from treering.rl.sampler import FailedSteps, check_prompts, with_stops
from treering.rl.step_report import Overlap, Phases, RlStepReport, as_trajectories, rollout_report
from treering.rl.tasks.task import Prompt, Task
from treering.rl.trainer import Trained
from treering.runtime.account import Account
from treering.runtime.controller import FinishedStep, PipelineSpec
from treering.runtime.moves import prices_of
from treering.runtime.open_step import OpenStep
from treering.runtime.scheduling import StepScheduler
from treering.schedule.cluster import Latency
from treering.train.loop.batches import StepTasks
from treering.types import PromptId


class RunState:
    """Steps of a run, in order.

    Example: at staleness 1, `steps_to_open(0)` yields steps 1 and 2. Step 3 is scheduled once step 1 is sampled, and
    `steps_to_open(2)` yields it once step 1 is complete.
    """

    def __init__(self, task: Task, spec: PipelineSpec) -> None:
        """Start before the first step.

        Raises:
            InputError: if there is no prompt, or two prompts share an id.
        """
        check_prompts(task)
        options = spec.options
        self._task, self._options = task, options
        self._sampling = with_stops(options.sampling, task)
        self._steps = StepTasks(num_tasks=len(task.prompts), trees_per_step=options.prompts_per_step, seed=options.seed)
        self.num_steps_done = 0
        """Number of steps done since the start of the run."""
        self._draws: dict[PromptId, int] = {}
        self.account = Account()
        self.version = 0
        self._num_steps, self._cluster = spec.num_steps, spec.cluster
        self._early: dict[int, list[list[Request]]] = {}
        self._failed_steps = FailedSteps(task.reward_name)
        self._scheduler = StepScheduler(
            spec.policy,
            spec.predictor,
            spec.cluster,
            prompt_ids=[prompt.prompt_id for prompt in task.prompts],
            prompts_of=self._steps.tasks_of,
            group_size=options.group_size,
            num_steps=spec.num_steps,
        )

    @property
    def epoch(self) -> int:
        """Epoch of the latest step."""
        return self._steps.epoch_of(self.num_steps_done)

    @property
    def measured(self) -> Latency | None:
        """The measured latency of the next assignment; None if it uses the cluster's."""
        return self._scheduler.measured

    @property
    def past(self) -> range:
        """Earlier steps whose weights the next steps are sampled with."""
        return self._past(self.num_steps_done)

    def check_not_finished(self) -> None:
        """Check that a step is left.

        Raises:
            StateError: if all steps are done.
        """
        if self.num_steps_done >= self._num_steps:
            raise StateError(
                f"a pipeline runs a fixed number of steps, and all {self._num_steps} are done; make a new loop "
                "with more steps, and load this one's state"
            )

    def steps_to_open(self, last_open: int) -> Iterator[OpenStep]:
        """Yield the steps that may start now; each is scheduled after the same earlier steps in every run."""
        last = min(self._num_steps, self.num_steps_done + 1 + self._cluster.staleness)
        for step in range(max(last_open, self.num_steps_done) + 1, last + 1):
            collection = self._collection(step)
            version = self._cluster.version_of(step)
            assigned = self._scheduler.schedule(step)
            cluster = self._scheduler.cluster
            # Episodes stay on the worker where they began.
            may_move = cluster.rebalancing == "running" and not isinstance(self._task, EnvironmentTask)
            yield OpenStep(
                assigned,
                collection,
                version=version,
                num_workers=cluster.num_workers,
                ratios=self._scheduler.ratios(),
                prices=prices_of(cluster) if may_move else None,
            )

    def early_requests(self, step: int) -> Sequence[Sequence[Request]] | None:
        """Return the requests of a later step by worker, in their order, or None if nothing is rehearsed.

        With several workers they are known once the step is scheduled.
        """
        if self._options.rehearse == "off" or step > self._num_steps or isinstance(self._task, EnvironmentTask):
            return None
        if step not in self._early:
            assigned = self._scheduler.scheduled(step)
            if assigned is None and self._cluster.num_workers > 1:
                return None
            collection = self._collection(step)
            assert isinstance(collection, Collection), "episodes are not rehearsed"
            requests = collection.requests()
            by_worker: list[list[Request]] = [[] for _ in range(self._cluster.num_workers)]
            order = range(len(requests)) if assigned is None else assigned.assignment.order.tolist()
            for number in order:
                by_worker[0 if assigned is None else assigned.assignment.workers[number]].append(requests[number])
            self._early = {step: by_worker}
        return self._early[step]

    def note_sampled(self, open_step: OpenStep) -> None:
        """Record the lengths of a sampled step and, while it trains, schedule the first step that may use them."""
        self._scheduler.observe(open_step.step, open_step.lengths, open_step.turns)
        following = open_step.step + 1 + self._cluster.staleness
        if following <= self._num_steps:
            self._scheduler.schedule(following)

    def complete_step(self, finished: FinishedStep) -> list[Trajectory]:
        """Make a trained step the latest one; return its rollouts with advantages.

        Raises:
            StateError: if every reward of several steps failed.
        """
        open_step, trained = finished.open_step, finished.done.trained
        collected = open_step.collection.result()
        self._failed_steps.note(open_step.step, collected)
        self.account.add(settle_account(finished))
        self._draws, self.num_steps_done = self._draws_before(open_step.step + 1), open_step.step
        self._scheduler.note_times(finished.times)
        self.version += trained.update is not None
        return as_trajectories(
            collected.groups,
            epoch=self.epoch,
            step=open_step.step,
            advantages=trained.group_advantages,
        )

    def state(self) -> dict[str, Any]:
        """Return steps, version, draws, assignments and account, for a checkpoint."""
        return {
            "num_steps_done": self.num_steps_done,
            "version": self.version,
            "draws": dict(self._draws),
            "planner": self._scheduler.state(),
            "account": self.account.as_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
        """Resume from a `state`, which may come from an `RlLoop`; return the past weights that the next steps need.

        Raises:
            StateError: if weights for the next steps are missing, or an earlier version of Treering wrote the state.
        """
        _check_format(state)
        step = state["num_steps_done"]
        needed = set(self._past(step))
        past = tuple(each for each in state.get("past", []) if each["step"] in needed)
        missing = needed - {each["step"] for each in past}
        if missing:
            raise StateError(
                f"at staleness {self._cluster.staleness} the next steps need the weights after steps "
                f"{sorted(missing)}, but the checkpoint lacks them; resume with the staleness that it was saved with"
            )
        self.version = state["version"]
        self.num_steps_done, self._draws = step, dict(state["draws"])
        self.account = Account(**state.get("account", {}))
        if "planner" in state:
            self._scheduler.load_state(state["planner"])
        return past

    def _prompts_of(self, step: int) -> list[Prompt]:
        return [self._task.prompts[number] for number in self._steps.tasks_of(step)]

    def _draws_before(self, step: int) -> dict[PromptId, int]:
        """Return how often each prompt is scheduled before a future step.

        With 5 prompts in steps of 2, step 4 starts the second epoch, and its prompts have draw 1.
        """
        draws = Counter(self._draws)
        for earlier in range(self.num_steps_done + 1, step):
            draws.update(prompt.prompt_id for prompt in self._prompts_of(earlier))
        return dict(draws)

    def _collection(self, step: int) -> Collection | EpisodeCollection:
        """Return an empty collection for a future step."""
        prompts, draws, group_size = self._prompts_of(step), self._draws_before(step), self._options.group_size
        if isinstance(self._task, EnvironmentTask):
            return EpisodeCollection(self._task, prompts, draws, group_size=group_size, sampling=self._sampling)
        return Collection(prompts, draws, group_size=group_size, sampling=self._sampling)

    def _past(self, step: int) -> range:
        return range(max(0, step - self._cluster.staleness), step)


def _check_format(state: Mapping[str, Any]) -> None:
    """Refuse checkpoints of earlier versions, whose records have other names."""
    known = Account().as_dict().keys() >= state.get("account", {}).keys()
    planner = state.get("planner", {"observed": ()})
    is_scheduler_known = "observed" in planner and planner.get("lengths", {}).get("name", "median") == "median"
    if not known or not is_scheduler_known or any("policy_version" not in each for each in state.get("past", [])):
        raise StateError(
            "this checkpoint was written by an earlier version of Treering, and only that version can resume it; "
            "start a new run, or install that version"
        )


def settle_account(finished: FinishedStep) -> Account:
    """Return the account of a finished step, with the counts of its training.

    Raises:
        StateError: if a rollout is missing or counted twice.
    """
    open_step, trained = finished.open_step, finished.done.trained
    collected = open_step.collection.result()
    account = open_step.account
    account.reward_errors, account.unscored = collected.num_reward_errors, collected.num_unscored
    account.empty = collected.num_empty
    kept = {rollout.key for group in collected.groups for rollout in group.rollouts}
    used = _trained_branches(collected.groups, trained)
    num_lost = len(used) - (0 if trained.update is None else trained.update.num_branches)
    account.trained = len(set(used)) - num_lost
    account.without_variance = len(kept - set(used))
    account.check(open_step.step)
    return account


def _trained_branches(groups: Sequence[Group], trained: Trained) -> list[RolloutKey]:
    """Return the keys of the branches that an update must include, one for each branch of a run."""
    keys = [[rollout.key for rollout in group.rollouts] for group in groups]
    # A KL in the loss also trains groups with equal rewards.
    has_all = trained.num_rollouts == sum(map(len, keys))
    pairs = zip(keys, trained.group_advantages, strict=True)
    return [key for of_group, values in pairs if has_all or any(map(np.any, values)) for key in of_group]


def report_of(finished: FinishedStep, *, epoch: int, step_s: float) -> RlStepReport:
    """Return the report of a finished step that took `step_s` seconds."""
    open_step, done = finished.open_step, finished.done
    return RlStepReport(
        step=open_step.step,
        epoch=epoch,
        version=finished.policy_version,
        rollouts=rollout_report(
            open_step.collection.result(),
            num_zero_variance=done.trained.num_zero_variance,
            num_empty_groups=done.trained.num_empty_groups,
        ),
        engine=open_step.stats,
        update=done.trained.update,
        phases=Phases(
            rollout_s=open_step.ended_s - open_step.started_s,
            train_s=done.train_s,
            update_s=done.update_s,
            step_s=step_s,
        ),
        overlap=Overlap(
            trainer_wait_s=finished.trainer_wait_s,
            bubble=finished.bubble,
            staleness=open_step.step - 1 - open_step.version,
            num_stolen=open_step.account.stolen,
            num_moved=open_step.account.moved,
            num_resampled=open_step.account.sampled_again,
            spans=finished.spans,
        ),
    )
