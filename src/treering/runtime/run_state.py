"""The progress of a run: steps done and open, their plans, the policy version and the account."""

from collections.abc import Iterator, Mapping
from typing import Any

from treering.data import Trajectory
from treering.errors import StateError
from treering.rl.options import RlOptions
from treering.rl.tasks.task import Task
from treering.rl.trajectories import as_trajectories
from treering.runtime.account import Account
from treering.runtime.controller import Finished
from treering.runtime.reports import settled
from treering.runtime.step.agenda import Agenda
from treering.runtime.step.migration import prices_of
from treering.runtime.step.planning import Planner
from treering.runtime.step.step_run import StepRun
from treering.schedule.cluster import Cluster
from treering.schedule.latency import Latency
from treering.schedule.policy import Policy
from treering.schedule.predict.lengths import LengthPredictor


class RunState:
    """The steps of a run, one after another.

    Example: at staleness 1 `steps_to_open(0)` gives the steps 1 and 2. Once 1 is sampled the third is planned, and when
    1 is taken over, `steps_to_open(2)` gives it.
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
        """Begins before the first step.

        Raises:
            InputError: no prompt, or two prompts of one id.
        """
        self._agenda = Agenda(task, options)
        self.account = Account()
        self.version = 0
        self._num_steps, self._cluster = num_steps, cluster
        self._planner = Planner(
            policy,
            predictor,
            cluster,
            prompt_ids=[prompt.prompt_id for prompt in task.prompts],
            prompts_of=self._agenda.plan.tasks_of,
            group_size=options.group_size,
            num_steps=num_steps,
        )

    @property
    def num_steps_done(self) -> int:
        """Steps since the start of the run."""
        return self._agenda.num_steps_done

    @property
    def epoch(self) -> int:
        """Of the latest step."""
        return self._agenda.plan.epoch_of(self.num_steps_done)

    @property
    def max_tokens(self) -> int:
        """Of a rollout."""
        return self._agenda.sampling.max_tokens

    @property
    def measured(self) -> Latency | None:
        """See `Planner.measured`."""
        return self._planner.measured

    @property
    def past(self) -> range:
        """Steps before the latest one whose weights the next ones are sampled with."""
        return self._past(self.num_steps_done)

    def check_not_over(self) -> None:
        """Sees that there is a step left.

        Raises:
            StateError: all are done.
        """
        if self.num_steps_done >= self._num_steps:
            raise StateError(
                f"a pipeline knows its end when it begins, and all {self._num_steps} steps are done; make a new loop "
                "with more steps, and load this one's state"
            )

    def steps_to_open(self, last_open: int) -> Iterator[StepRun]:
        """What may be sampled now beside the steps that are; each is planned when the same ones are done as ever."""
        last = min(self._num_steps, self.num_steps_done + 1 + self._cluster.staleness)
        for step in range(max(last_open, self.num_steps_done) + 1, last + 1):
            collection = self._agenda.collection(step)
            version = self._cluster.version_of(step)
            plan = self._planner.plan(step)
            cluster = self._planner.cluster
            yield StepRun(
                plan,
                collection,
                version=version,
                num_workers=cluster.num_workers,
                ratios=self._planner.ratios(),
                prices=prices_of(cluster) if cluster.rebalancing == "running" else None,
            )

    def note_sampled(self, run: StepRun) -> None:
        """Takes what a step's rollouts came to be; while it is trained, plans the first step that may know of it."""
        self._planner.tell(run.step, run.lengths)
        following = run.step + 1 + self._cluster.staleness
        if following <= self._num_steps:
            self._planner.plan(following)

    def take_over(self, finished: Finished) -> list[Trajectory]:
        """Makes a trained step the latest one, and gives its rollouts with advantages."""
        run, trained = finished.run, finished.done.trained
        self.account.add(settled(finished))
        self._agenda.note_done(run.step)
        self._planner.note_times(finished.times)
        self.version += trained.update is not None
        return as_trajectories(
            run.collection.result().groups,
            epoch=self.epoch,
            step=run.step,
            advantages=trained.group_advantages,
        )

    def state(self) -> dict[str, Any]:
        """What goes on with the run: steps, version, draws, plans and account."""
        return {
            "num_steps_done": self.num_steps_done,
            "version": self.version,
            "draws": dict(self._agenda.draws),
            "planner": self._planner.state(),
            "account": self.account.as_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
        """Goes on from a `state`, also one of an `RlLoop`, and gives those of its past weights that are needed.

        Raises:
            StateError: a state that lacks weights which the next steps are sampled with.
        """
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
        self._agenda.go_to(step, state["draws"])
        self.account = Account(**state.get("account", {}))
        if "planner" in state:
            self._planner.load_state(state["planner"])
        return past

    def _past(self, step: int) -> range:
        return range(max(0, step - self._cluster.staleness), step)
