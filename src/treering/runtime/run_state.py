"""The progress of a run: steps done and open, their prompts and plans, the policy version and the account."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from treering.data import Trajectory
from treering.errors import StateError
from treering.rl.checks import FailedSteps, check_prompts, with_stops
from treering.rl.collect import Collection
from treering.rl.environments.collect import EpisodeCollection
from treering.rl.environments.task import EnvironmentTask
from treering.rl.options import RlOptions
from treering.rl.rollout_log import as_trajectories
from treering.rl.tasks.task import Prompt, Task
from treering.runtime.account import Account
from treering.runtime.controller import FinishedStep
from treering.runtime.reports import settle_account
from treering.runtime.step.migration import prices_of
from treering.runtime.step.open_step import OpenStep
from treering.runtime.step.planning import Planner
from treering.schedule.cluster import Cluster
from treering.schedule.latency import Latency
from treering.schedule.policy import Policy
from treering.schedule.predict.lengths import LengthPredictor
from treering.train.loop.batches import StepPlan
from treering.types import PromptId


class RunState:
    """The steps of a run, in order.

    Example: at staleness 1 `steps_to_open(0)` yields the steps 1 and 2. Step 3 is planned once step 1 is sampled,
    and `steps_to_open(2)` yields it once step 1 is complete.
    """

    def __init__(
        self,
        task: Task,
        options: RlOptions,
        *,
        num_steps: int,
        cluster: Cluster,
        policy: Policy,
        predictor: LengthPredictor,
    ) -> None:
        """Starts before the first step.

        Raises:
            InputError: no prompt, or two prompts of one id.
        """
        check_prompts(task)
        self._task, self._options = task, options
        self._sampling = with_stops(options.sampling, task)
        self._steps = StepPlan(num_tasks=len(task.prompts), trees_per_step=options.prompts_per_step, seed=options.seed)
        self.num_steps_done = 0
        """Steps done since the start of the run."""
        self._draws: dict[PromptId, int] = {}
        self.account = Account()
        self.version = 0
        self._num_steps, self._cluster = num_steps, cluster
        self._failed_steps = FailedSteps(task.reward_name)
        self._planner = Planner(
            policy,
            predictor,
            cluster,
            prompt_ids=[prompt.prompt_id for prompt in task.prompts],
            prompts_of=self._steps.tasks_of,
            group_size=options.group_size,
            num_steps=num_steps,
        )

    @property
    def epoch(self) -> int:
        """Epoch of the latest step."""
        return self._steps.epoch_of(self.num_steps_done)

    @property
    def measured(self) -> Latency | None:
        """See `Planner.measured`."""
        return self._planner.measured

    @property
    def past(self) -> range:
        """Earlier steps whose weights the next steps are sampled with."""
        return self._past(self.num_steps_done)

    def check_not_finished(self) -> None:
        """Checks that a step is left.

        Raises:
            StateError: all steps are done.
        """
        if self.num_steps_done >= self._num_steps:
            raise StateError(
                f"a pipeline runs a fixed number of steps, and all {self._num_steps} steps are done; make a new loop "
                "with more steps, and load this one's state"
            )

    def steps_to_open(self, last_open: int) -> Iterator[OpenStep]:
        """Steps that may start now. Each is planned after the same earlier steps in every run."""
        last = min(self._num_steps, self.num_steps_done + 1 + self._cluster.staleness)
        for step in range(max(last_open, self.num_steps_done) + 1, last + 1):
            collection = self._collection(step)
            version = self._cluster.version_of(step)
            plan = self._planner.plan(step)
            cluster = self._planner.cluster
            # Episodes stay where they began.
            may_move = cluster.rebalancing == "running" and not isinstance(self._task, EnvironmentTask)
            yield OpenStep(
                plan,
                collection,
                version=version,
                num_workers=cluster.num_workers,
                ratios=self._planner.ratios(),
                prices=prices_of(cluster) if may_move else None,
            )

    def note_sampled(self, open_step: OpenStep) -> None:
        """Records the lengths of a sampled step and, while it trains, plans the first step that may use them."""
        self._planner.observe(open_step.step, open_step.lengths, open_step.turns)
        following = open_step.step + 1 + self._cluster.staleness
        if following <= self._num_steps:
            self._planner.plan(following)

    def complete_step(self, finished: FinishedStep) -> list[Trajectory]:
        """Makes a trained step the latest one; returns its rollouts with advantages.

        Raises:
            StateError: every reward of several steps failed.
        """
        open_step, trained = finished.open_step, finished.done.trained
        collected = open_step.collection.result()
        self._failed_steps.note(open_step.step, collected)
        self.account.add(settle_account(finished))
        self._draws, self.num_steps_done = self._draws_before(open_step.step + 1), open_step.step
        self._planner.note_times(finished.times)
        self.version += trained.update is not None
        return as_trajectories(
            collected.groups,
            epoch=self.epoch,
            step=open_step.step,
            advantages=trained.group_advantages,
        )

    def state(self) -> dict[str, Any]:
        """Steps, version, draws, plans and account, for a checkpoint."""
        return {
            "num_steps_done": self.num_steps_done,
            "version": self.version,
            "draws": dict(self._draws),
            "planner": self._planner.state(),
            "account": self.account.as_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
        """Resumes from a `state`, also one of an `RlLoop`; returns the past weights that the next steps need.

        Raises:
            StateError: weights that the next steps need are missing, or an earlier version wrote the state.
        """
        _check_format(state)
        step = state["num_steps_done"]
        needed = set(self._past(step))
        past = tuple(each for each in state.get("past", []) if each["step"] in needed)
        missing = needed - {each["step"] for each in past}
        if missing:
            raise StateError(
                f"at staleness {self._cluster.staleness} the next steps are sampled with the weights after steps "
                f"{sorted(missing)} too, and the checkpoint has none; resume with the staleness that it was saved with"
            )
        self.version = state["version"]
        self.num_steps_done, self._draws = step, dict(state["draws"])
        self.account = Account(**state.get("account", {}))
        if "planner" in state:
            self._planner.load_state(state["planner"])
        return past

    def _prompts_of(self, step: int) -> list[Prompt]:
        return [self._task.prompts[number] for number in self._steps.tasks_of(step)]

    def _draws_before(self, step: int) -> dict[PromptId, int]:
        """How often each prompt is scheduled before a future step.

        With 5 prompts in steps of 2, step 4 starts the second epoch, and its prompts have draw 1.
        """
        draws = Counter(self._draws)
        for earlier in range(self.num_steps_done + 1, step):
            draws.update(prompt.prompt_id for prompt in self._prompts_of(earlier))
        return dict(draws)

    def _collection(self, step: int) -> Collection | EpisodeCollection:
        """An empty collection for a future step."""
        prompts, draws, group_size = self._prompts_of(step), self._draws_before(step), self._options.group_size
        if isinstance(self._task, EnvironmentTask):
            return EpisodeCollection(self._task, prompts, draws, group_size=group_size, sampling=self._sampling)
        return Collection(prompts, draws, group_size=group_size, sampling=self._sampling)

    def _past(self, step: int) -> range:
        return range(max(0, step - self._cluster.staleness), step)


def _check_format(state: Mapping[str, Any]) -> None:
    """Refuses the checkpoints of earlier versions, whose records have other names."""
    known = Account().as_dict().keys() >= state.get("account", {}).keys()
    planner = state.get("planner", {"observed": ()})
    is_planner_known = "observed" in planner and planner.get("lengths", {}).get("name", "median") == "median"
    if not known or not is_planner_known or any("policy_version" not in each for each in state.get("past", [])):
        raise StateError(
            "a run is resumed by the version of Treering that began it, and this checkpoint was written by an earlier "
            "one; start a new run, or install that version"
        )
