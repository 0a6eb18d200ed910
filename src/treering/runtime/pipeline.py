"""Run the pipelined RL loop: steps overlap, with the same results as one after another.

All slow work happens in other processes. Step k is sampled only with the weights after step k - 1 - staleness, so
timing, stealing and crashes never change a rollout (law 6).
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from treering.closing import Closing
from treering.data import Trajectory
from treering.engine.protocol import Rollout
from treering.errors import Interrupted, StateError
from treering.rl.sampler import check_contexts
from treering.rl.step_report import RlStepReport
from treering.rl.tasks.task import Task
from treering.runtime.account import Account
from treering.runtime.controller import Controller, FinishedStep, PipelineSpec, StartState
from treering.runtime.run_state import RunState, report_of
from treering.runtime.trainer_worker import unpacked
from treering.schedule.cluster import Latency
from treering.train.loop.checkpoint import Resumable, set_random_state
from treering.train.router_losses import check_routers


class PipelineLoop(Closing, Resumable[RlStepReport]):
    """`RlLoop` in several processes: rollout workers, a reward worker, a trainer, and this process as controller.

    The processes start with the first step. They sample later steps while one is trained, and between calls. A process
    that dies is replaced, which costs only time. At staleness 0 the steps equal those of `RlLoop`.

    Example:
        >>> spec = PipelineSpec(recipe=recipe, optim=optim, options=options, num_steps=100, cluster=cluster,
        ...                     policy=make_policy("histopipe"), predictor=predictor,
        ...                     actors=RayActors(num_rollout_workers=2))                         # doctest: +SKIP
        >>> with PipelineLoop(model, task, spec) as loop:                                      # doctest: +SKIP
        ...     print([loop.step().rollouts.reward_mean for _ in range(3)])
        [0.48, 0.5, 0.53]
    """

    def __init__(self, model: nn.Module, task: Task, spec: PipelineSpec) -> None:
        """Set up the loop without starting processes.

        Args:
            model: the initial weights; it gets the new weights after every step.
            task: the prompts; rewards come from the recipe's task.
            spec: how to run it.

        Raises:
            InputError: if there is no prompt, two share an id, or a prompt's rollouts exceed the model's positions.
            UnsupportedError: for router losses of a model without routers.
        """
        check_contexts(task, spec.options.sampling.max_tokens, model)
        check_routers(model, spec.options.router_losses)
        self.model = model
        self._task, self._spec, self._drafting = task, spec, spec.drafting
        self._run_state = RunState(task, spec)
        self._latest: list[Trajectory] = []
        self._start_state = StartState()
        self._controller: Controller | None = None
        self._is_closed = False

    @property
    def num_steps_done(self) -> int:
        """Number of steps since the start of the run, including those before a resume or without an update."""
        return self._run_state.num_steps_done

    @property
    def version(self) -> int:
        """Policy version of the weights: updates since the start of the run."""
        return self._run_state.version

    @property
    def account(self) -> Account:
        """Counts of what happened to every rollout of the finished steps."""
        return self._run_state.account

    @property
    def measured(self) -> Latency | None:
        """The measured latency that policies use; None while they use the cluster's."""
        return self._run_state.measured

    @property
    def latest(self) -> list[Trajectory]:
        """Rollouts of the latest step as trajectories with advantages; empty before the first."""
        return self._latest

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the ready processes, by name; empty before the first step."""
        processes = [] if self._controller is None else self._controller.processes
        return {process.name: process.pid for process in processes if process.pid is not None}

    def step(self) -> RlStepReport:
        """Run until the next step is trained, while later steps are sampled.

        An error stops all processes; continue with a new loop from the latest checkpoint. After an `Interrupted` from
        `on_progress`, the loop can still be saved, as of the previous step.

        Raises:
            InputError: for a prompt that does not fit an engine.
            StateError: for non-finite gradients, a process that dies repeatedly, or a closed loop.
        """
        self._run_state.check_not_finished()
        try:
            controller = self._started()
            started_s = time.perf_counter()
            self._open_steps(controller)
            finished = controller.finish(
                self._run_state.num_steps_done + 1, self._run_state.note_sampled, self.on_progress
            )
            self._complete_step(controller, finished)
            # Keep the workers busy until the next call.
            self._open_steps(controller)
            controller.dispatch()
        except Interrupted:
            raise
        except BaseException:
            self.close()
            raise
        return report_of(finished, epoch=self._run_state.epoch, step_s=time.perf_counter() - started_s)

    def state(self) -> dict[str, Any]:
        """Return the state of `RlLoop.state`, plus the earlier weights that the next steps are sampled with.

        Unfinished rollouts are not saved: a resumed run samples them again. Nor is the drafters' feedback, because each
        worker has its own drafter. Sets torch's random state to the trainer's.
        """
        try:
            controller = self._started()
            saved = unpacked(controller.trainer_client.fetch())
        except BaseException:
            self.close()
            raise
        set_random_state(saved["random"])
        versions, store = controller.policy_versions, controller.store
        past = [
            {"step": k, "policy_version": versions[k], "weights": store.tensors(k, self.model)}
            for k in self._run_state.past
        ]
        return {**self._run_state.state(), "optimizer": saved["optimizer"], "drafter": None, "past": past}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state`, which may come from an `RlLoop`; new processes start with the next step.

        Raises:
            StateError: as in `RunState.load_state`.
        """
        self._end_processes()
        past, optimizer = self._run_state.load_state(state), state["optimizer"]
        self._start_state = StartState(
            step=self.num_steps_done, policy_version=self.version, optimizer=optimizer, past=past
        )

    def save_hints(self, file: Path) -> None:
        """Write the history, if there is one."""
        if self._drafting is not None:
            self._drafting.save(file)

    def load_hints(self, file: Path) -> None:
        """Load the history; a missing or damaged file only causes a warning and costs speed."""
        if self._drafting is not None:
            self._drafting.load(file)

    def close(self) -> None:
        """Stop all processes; weights, account and latest rollouts stay."""
        self._end_processes()
        self._is_closed = True
        if self._drafting is not None:
            self._drafting.close()

    def _started(self) -> Controller:
        if self._is_closed:
            raise StateError("this loop was closed or has failed; make a new one and load the last checkpoint")
        if self._controller is None:
            on_finished = None if self._drafting is None else self._remember
            self._controller = Controller(
                self._spec, self._start_state, self.model, self._task, account=self.account, on_finished=on_finished,
                early_requests=self._run_state.early_requests,
            )  # fmt: skip
            self._start_state = StartState()
            # Schedule while the processes import their modules.
            self._open_steps(self._controller)
            self._controller.wait_until_ready(self.on_progress)
        return self._controller

    def _open_steps(self, controller: Controller) -> None:
        for open_step in self._run_state.steps_to_open(controller.last_open):
            controller.open(open_step)

    def _complete_step(self, controller: Controller, finished: FinishedStep) -> None:
        """Make a trained step the latest one: update account, history, and the weights here and in the workers."""
        self._latest = self._run_state.complete_step(finished)
        controller.store.read(self.num_steps_done, self.model)
        if self._drafting is not None:
            self._drafting.publish()
        controller.announce(self.num_steps_done, self.version)
        controller.trainer_client.compact()

    def _remember(self, rollout: Rollout) -> bool:
        """Add a rollout to the history; return whether that published a new index."""
        assert self._drafting is not None
        before = self._drafting.snapshot
        self._drafting.add(rollout)
        return self._drafting.snapshot is not before

    def _end_processes(self) -> None:
        if self._controller is not None:
            self._controller.close()
        self._controller = None
