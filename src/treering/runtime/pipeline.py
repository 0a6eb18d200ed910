"""The pipelined loop of reinforcement learning: its steps overlap, and their results are those of one after another.

Knows steps, versions, checkpoints and reports; everything that takes time happens in processes. Step k is sampled
wholly by the weights after step k - 1 - staleness, whatever the clock says, so nothing that is timed, stolen or killed
changes a rollout (law 6).
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from torch import nn

from treering.data import Trajectory
from treering.engine.rollout import Rollout
from treering.errors import ConfigError, StateError
from treering.rl.drafting import Drafting, DraftOptions
from treering.rl.options import RlOptions
from treering.rl.step_report import RlStepReport
from treering.rl.task import Task
from treering.rl.trajectories import as_trajectories
from treering.runtime.account import Account
from treering.runtime.agenda import Agenda
from treering.runtime.assembly import Beginning, Blueprint, start_crew
from treering.runtime.crew import Crew, Finished
from treering.runtime.finishing import report_of, settled
from treering.runtime.moving import prices_of
from treering.runtime.planning import Planner
from treering.runtime.recipe import Recipe
from treering.runtime.step_run import StepRun
from treering.runtime.training import unpacked
from treering.schedule.cluster import Cluster
from treering.schedule.lengths import LengthPredictor
from treering.schedule.policy import Policy
from treering.train.checkpoint import set_random_state
from treering.train.optim import OptimOptions
from treering.train.resumable import Resumable
from treering.train.router_losses import check_routers


class PipelineLoop(Resumable[RlStepReport]):
    """An `RlLoop` in processes: rollout workers, one judge for rewards, one trainer, and this process as controller.

    Processes start with the first step and sample the steps behind it while it is trained, also between calls. A
    process that dies is replaced, and costs time only. At staleness 0 the steps are those of `RlLoop`.

    Example:
        >>> with PipelineLoop(model, task, recipe, optim=optim, options=options, num_steps=100, cluster=cluster,
        ...                   policy=make_policy("histopipe"), predictor=predictor) as loop:      # doctest: +SKIP
        ...     print([loop.step().rollouts.reward_mean for _ in range(3)])
        [0.48, 0.5, 0.53]
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        recipe: Recipe,
        *,
        optim: OptimOptions,
        options: RlOptions,
        num_steps: int,
        cluster: Cluster,
        policy: Policy,
        predictor: LengthPredictor,
        drafting: Drafting | None = None,
        reward_time_limit_s: float = 60.0,
    ) -> None:
        """Starts nothing yet.

        Args:
            model: has the weights to begin with, and those of the latest step after each.
            task: prompts; rewards are asked of the recipe's task.
            recipe: builds model, task and engines in other processes.
            optim: the optimiser.
            options: of the steps, as `RlLoop` has them.
            num_steps: of the whole run: nothing is sampled for steps beyond.
            cluster: workers, and the staleness; its slots and times are what policies plan with.
            policy: a new one.
            predictor: a new one.
            drafting: memory of earlier rollouts, in a folder that workers read; None samples without speculation.
            reward_time_limit_s: for one reward or observation; a rollout that takes longer is left out.

        Raises:
            InputError: no prompt, or two prompts of one id.
            ConfigError: a drafting without a folder, or a time limit that is none.
            UnsupportedError: router losses of a model without routers.
        """
        if drafting is not None and drafting.folder is None:
            raise ConfigError("workers read the history in its folder, and this drafting has none; give it a folder")
        if not reward_time_limit_s > 0:
            raise ConfigError(f"a reward takes time, got reward_time_limit_s={reward_time_limit_s}; raise it")
        check_routers(model, options.router_losses)
        self.model = model
        self._agenda = Agenda(task, options)
        self._num_steps, self._cluster = num_steps, cluster
        self._drafting = drafting
        self._blueprint = Blueprint(
            recipe=recipe,
            optim=optim,
            options=options,
            cluster=cluster,
            max_tokens=self._agenda.sampling.max_tokens,
            history=None if drafting is None else drafting.folder,
            drafts=DraftOptions() if drafting is None else drafting.options,
            time_limit_s=reward_time_limit_s,
        )
        self._planner = Planner(
            policy,
            predictor,
            cluster,
            prompt_ids=[prompt.prompt_id for prompt in task.prompts],
            prompts_of=self._agenda.plan.tasks_of,
            group_size=options.group_size,
            num_steps=num_steps,
        )
        self.account = Account()
        self._version = 0
        self._latest: list[Trajectory] = []
        self._beginning = Beginning()
        self._crew: Crew | None = None
        self._is_closed = False

    @property
    def num_steps_done(self) -> int:
        """Steps since the start of the run, resumed ones included; those that trained nothing count too."""
        return self._agenda.num_steps_done

    @property
    def version(self) -> int:
        """Policy version of the weights: updates since the start of the run."""
        return self._version

    @property
    def latest(self) -> list[Trajectory]:
        """The rollouts of this process's latest step as trajectories with advantages; none before it."""
        return self._latest

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name, of those that live; none before the first step."""
        seats = [] if self._crew is None else self._crew.seats
        return {seat.name: seat.pid for seat in seats if seat.pid is not None}

    def step(self) -> RlStepReport:
        """Works until the next step is trained; later ones go on being sampled.

        An error ends all processes: go on with a new loop, from the latest checkpoint.

        Raises:
            InputError: a prompt that an engine cannot hold.
            StateError: gradients that are not finite, a process that dies again and again, or a loop that is over.
        """
        if self._agenda.num_steps_done >= self._num_steps:
            raise StateError(
                f"a pipeline knows its end when it begins, and all {self._num_steps} steps are done; make a new loop "
                "with more steps, and load this one's state"
            )
        try:
            crew = self._started()
            started_s = time.perf_counter()
            self._open_steps(crew)
            finished = crew.finish(self._agenda.num_steps_done + 1)
            self._take_over(crew, finished)
            # Workers have something to do until the next call.
            self._open_steps(crew)
            crew.dispatch()
        except BaseException:
            self.close()
            raise
        epoch = self._agenda.plan.epoch_of(finished.run.step)
        return report_of(finished, epoch=epoch, step_s=time.perf_counter() - started_s)

    def state(self) -> dict[str, Any]:
        """What `RlLoop.state` has, and the weights of the steps before that the next ones are sampled with.

        Rollouts that are under way are no part of it: a run that goes on from here samples them again. What drafters
        have learnt is none either; each worker has its own, and learns it anew. Torch's random state becomes the
        trainer's.
        """
        try:
            crew = self._started()
            saved = unpacked(crew.workshop.fetch())
        except BaseException:
            self.close()
            raise
        set_random_state(saved["random"])
        steps = range(max(0, self._agenda.num_steps_done - self._cluster.staleness), self._agenda.num_steps_done)
        return {
            "num_steps_done": self._agenda.num_steps_done,
            "version": self._version,
            "draws": dict(self._agenda.draws),
            "optimizer": saved["optimizer"],
            "drafter": None,
            "past": [{"step": k, "label": crew.labels[k], "weights": crew.ring.tensors(k)} for k in steps],
            "planner": self._planner.state(),
            "account": self.account.as_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state`, also one of an `RlLoop`; new processes start with the next step.

        Raises:
            StateError: a state that lacks weights which the next steps are sampled with.
        """
        self._end_processes()
        step = state["num_steps_done"]
        needed = set(range(max(0, step - self._cluster.staleness), step))
        past = tuple(each for each in state.get("past", []) if each["step"] in needed)
        missing = needed - {each["step"] for each in past}
        if missing:
            raise StateError(
                f"at staleness {self._cluster.staleness} the next steps are sampled with the weights after steps "
                f"{sorted(missing)} too, and the checkpoint has none; resume with the staleness that it was saved with"
            )
        self._version = state["version"]
        self._agenda.go_to(step, state["draws"])
        self._beginning = Beginning(step=step, label=state["version"], optimizer=state["optimizer"], past=past)
        self.account = Account(**state.get("account", {}))
        if "planner" in state:
            self._planner.load_state(state["planner"])

    def save_hints(self, file: Path) -> None:
        """Writes the history, if there is one."""
        if self._drafting is not None:
            self._drafting.save(file)

    def load_hints(self, file: Path) -> None:
        """Takes the history of a file; a missing or damaged one costs a warning, and speed."""
        if self._drafting is not None:
            self._drafting.load(file)

    def close(self) -> None:
        """Ends all processes; weights, account and latest rollouts stay."""
        self._end_processes()
        self._is_closed = True
        if self._drafting is not None:
            self._drafting.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self) -> Crew:
        if self._is_closed:
            raise StateError("a loop that was closed, or has failed, is over; make a new one from its last checkpoint")
        if self._crew is None:
            on_over = None if self._drafting is None else self._remember
            self._crew = start_crew(self._blueprint, self._beginning, self.model, account=self.account, on_over=on_over)
            self._beginning = Beginning()
            # Plans are made while the processes import.
            self._open_steps(self._crew)
            self._crew.wait_until_ready()
        return self._crew

    def _open_steps(self, crew: Crew) -> None:
        """Opens what may be sampled now; each step is planned when the same earlier ones are done as in any run."""
        last = min(self._num_steps, self._agenda.num_steps_done + 1 + self._cluster.staleness)
        for step in range(max(crew.last_open, self._agenda.num_steps_done) + 1, last + 1):
            collection = self._agenda.collection(step)
            version = self._cluster.version_of(step)
            plan = self._planner.plan(step)
            crew.open(
                StepRun(
                    plan,
                    collection,
                    version=version,
                    num_workers=self._cluster.num_workers,
                    ratios=self._planner.ratios(),
                    prices=prices_of(self._cluster) if self._cluster.rebalancing == "running" else None,
                )
            )

    def _take_over(self, crew: Crew, finished: Finished) -> None:
        """Makes a trained step the latest one: in the account, in what is learnt, in the weights here and elsewhere."""
        run, trained = finished.run, finished.done.trained
        self.account.add(settled(finished))
        self._agenda.note_done(run.step)
        self._planner.tell(run.step, run.lengths)
        self._version += trained.update is not None
        self._latest = as_trajectories(
            run.collection.result().groups,
            epoch=self._agenda.plan.epoch_of(run.step),
            step=run.step,
            advantages=trained.group_advantages,
        )
        crew.ring.read(run.step, self.model)
        if self._drafting is not None:
            self._drafting.publish()
        crew.announce(run.step, self._version)
        crew.workshop.tidy()

    def _remember(self, rollout: Rollout) -> bool:
        """Adds a rollout to the history; whether it was published."""
        assert self._drafting is not None
        before = self._drafting.store.snapshot
        self._drafting.add(rollout)
        return self._drafting.store.snapshot is not before

    def _end_processes(self) -> None:
        if self._crew is not None:
            self._crew.close()
        self._crew = None
