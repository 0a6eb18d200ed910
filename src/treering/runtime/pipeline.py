"""The pipelined RL loop: steps overlap, with the same results as running them one after another.

All slow work happens in child processes. Step k is sampled entirely with the weights after step k - 1 - staleness, so
timing, stealing and crashes never change a rollout (law 6).
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
from treering.rl.tasks.task import Task
from treering.runtime.account import Account
from treering.runtime.controller import Controller, Finished
from treering.runtime.ipc.recipe import Recipe
from treering.runtime.launch import Beginning, Blueprint, start_controller
from treering.runtime.reports import report_of
from treering.runtime.run_state import RunState
from treering.runtime.workers.trainer_worker import unpacked
from treering.schedule.cluster import Cluster
from treering.schedule.latency import Latency
from treering.schedule.policy import Policy
from treering.schedule.predict.lengths import LengthPredictor
from treering.train.gradient.router_losses import check_routers
from treering.train.loop.checkpoint import set_random_state
from treering.train.loop.optim import OptimOptions
from treering.train.loop.resumable import Resumable


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
            cluster: workers, and the staleness; its slots, and its times until some are measured, are for policies.
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
        self._course = RunState(task, options, num_steps=num_steps, cluster=cluster, policy=policy, predictor=predictor)
        self._drafting = drafting
        self._blueprint = Blueprint(
            recipe=recipe,
            optim=optim,
            options=options,
            cluster=cluster,
            max_tokens=self._course.max_tokens,
            history=None if drafting is None else drafting.folder,
            drafts=DraftOptions() if drafting is None else drafting.options,
            time_limit_s=reward_time_limit_s,
        )
        self._latest: list[Trajectory] = []
        self._beginning = Beginning()
        self._crew: Controller | None = None
        self._is_closed = False

    @property
    def num_steps_done(self) -> int:
        """Steps since the start of the run, resumed ones included; those that trained nothing count too."""
        return self._course.num_steps_done

    @property
    def version(self) -> int:
        """Policy version of the weights: updates since the start of the run."""
        return self._course.version

    @property
    def account(self) -> Account:
        """What became of every rollout of the run's finished steps."""
        return self._course.account

    @property
    def measured(self) -> Latency | None:
        """The latency of passes as they were, which policies are told; None where that is still the cluster's."""
        return self._course.measured

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
        self._course.check_not_over()
        try:
            crew = self._started()
            started_s = time.perf_counter()
            self._open_steps(crew)
            finished = crew.finish(self._course.num_steps_done + 1, self._course.note_sampled)
            self._take_over(crew, finished)
            # Workers have something to do until the next call.
            self._open_steps(crew)
            crew.dispatch()
        except BaseException:
            self.close()
            raise
        return report_of(finished, epoch=self._course.epoch, step_s=time.perf_counter() - started_s)

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
        past = [{"step": k, "label": crew.labels[k], "weights": crew.ring.tensors(k)} for k in self._course.past]
        return {**self._course.state(), "optimizer": saved["optimizer"], "drafter": None, "past": past}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state`, also one of an `RlLoop`; new processes start with the next step.

        Raises:
            StateError: a state that lacks weights which the next steps are sampled with.
        """
        self._end_processes()
        past, optimizer = self._course.load_state(state), state["optimizer"]
        self._beginning = Beginning(step=self.num_steps_done, label=self.version, optimizer=optimizer, past=past)

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

    def _started(self) -> Controller:
        if self._is_closed:
            raise StateError("a loop that was closed, or has failed, is over; make a new one from its last checkpoint")
        if self._crew is None:
            on_over = None if self._drafting is None else self._remember
            self._crew = start_controller(
                self._blueprint, self._beginning, self.model, account=self.account, on_over=on_over
            )
            self._beginning = Beginning()
            # Plans are made while the processes import.
            self._open_steps(self._crew)
            self._crew.wait_until_ready()
        return self._crew

    def _open_steps(self, crew: Controller) -> None:
        for run in self._course.steps_to_open(crew.last_open):
            crew.open(run)

    def _take_over(self, crew: Controller, finished: Finished) -> None:
        """Makes a trained step the latest one: in the account, in what is learnt, in the weights here and elsewhere."""
        self._latest = self._course.take_over(finished)
        crew.ring.read(self.num_steps_done, self.model)
        if self._drafting is not None:
            self._drafting.publish()
        crew.announce(self.num_steps_done, self.version)
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
