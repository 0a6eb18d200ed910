"""The SFT loop: one optimizer step at a time, on tasks as trees or (the off-switch) as packed sequences."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from treering.config.optim import OptimOptions
from treering.config.sft_config import SftOptions
from treering.errors import InputError
from treering.model.checks import check_positions, max_positions
from treering.ranks.group import RankGroup
from treering.train.loop.batches import StepTasks, TrainingTask, check_ranks, make_batch, step_size
from treering.train.loop.checkpoint import Resumable, StepReport
from treering.train.loop.compute import num_threads, share_batch
from treering.train.loop.other_models import check_teacher, distill_objective
from treering.train.loop.update import Updater
from treering.train.objective import Objective
from treering.train.objectives.sft import sft
from treering.train.router_losses import check_routers
from treering.types import LossMask


class SftLoop(Resumable[StepReport]):
    """Loop that fine-tunes a model on tasks, or distills a teacher on them.

    Example:
        >>> options = SftOptions(trees_per_step=8, max_batch_tokens=16384)
        >>> loop = SftLoop(model, tasks, optim=OptimOptions(learning_rate=1e-4), options=options)  # doctest: +SKIP
        >>> [loop.step().update.loss for _ in range(3)]                                            # doctest: +SKIP
        [6.24, 6.11, 5.97]
    """

    def __init__(
        self,
        model: nn.Module,
        tasks: Sequence[TrainingTask],
        *,
        optim: OptimOptions,
        options: SftOptions,
        teacher: nn.Module | None = None,
        rank_group: RankGroup | None = None,
    ) -> None:
        """Set training mode, and gradient checkpointing as the options say; the teacher is not changed.

        The ranks of `rank_group`, which train a prepared model, share each step's trees by cost; weights match those
        of one rank.

        Raises:
            InputError: no task, no trained token, a sequence with more tokens than the model has positions, or a
                teacher with another vocabulary.
            ConfigError: a teacher without `options.distill`, or the reverse.
            UnsupportedError: router losses for a model without routers.
        """
        self.model = model
        self._rank_group = RankGroup() if rank_group is None else rank_group
        num_trees = step_size(options.trees_per_step, len(tasks), self._rank_group.size)
        self.step_tasks = StepTasks(num_tasks=len(tasks), trees_per_step=num_trees, seed=options.seed)
        self._tasks = tuple(tasks)
        self._options = options
        self._num_steps_done = 0
        if not any(task.num_trained_tokens for task in tasks):
            raise InputError(
                f"every loss mask of the {len(tasks)} tasks is 0, so no token would be trained; check the masks"
            )
        check_teacher(model, teacher, options)
        self._teacher = teacher
        for one in (model, teacher):
            _check_lengths(one, tasks)
        check_routers(model, options.router_losses)
        check_ranks(options.layout, self._rank_group.size)
        self._updater = Updater(model, optim, options, rank_group=self._rank_group)

    @property
    def num_steps_done(self) -> int:
        """Number of optimizer steps since the start of the run, including those before a resume."""
        return self._num_steps_done

    def step(self) -> StepReport:
        """Train the tasks of the next step and update the model.

        Raises:
            StateError: gradients that are not finite; the weights are those of the previous step.
        """
        started = time.perf_counter()
        step, options = self._num_steps_done + 1, self._options
        whole = make_batch([self._tasks[i] for i in self.step_tasks.tasks_of(step)], options.layout)
        batch = share_batch(whole, self._rank_group).batch
        objective = self._objective(batch.loss_masks)
        with num_threads(None, self.model):
            update = self._updater.update(
                step, batch, objective, router_losses=options.router_losses, on_progress=self.on_progress
            )
        self._num_steps_done = step
        return StepReport(
            step=step, epoch=self.step_tasks.epoch_of(step), seconds=time.perf_counter() - started, update=update
        )

    def _objective(self, loss_masks: Sequence[LossMask]) -> Objective:
        options = self._options
        plain = sft(loss_masks, **options.weighting)
        if options.distill is None or self._teacher is None:
            return plain
        return distill_objective(options.distill, self._teacher, plain)

    def state(self) -> dict[str, Any]:
        """Return the step number and optimizer state."""
        return {"num_steps_done": self._num_steps_done, "optimizer": self._updater.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from the `state` of a loop over the same parameters.

        Raises:
            StateError: the state belongs to a model with other parameters.
        """
        self._updater.load_state(state["optimizer"])
        self._num_steps_done = state["num_steps_done"]


def _check_lengths(model: nn.Module | None, tasks: Sequence[TrainingTask]) -> None:
    limit = None if model is None else max_positions(model)
    lengths = [(sequence.size, task.task_id) for task in tasks for sequence in task.sequences]
    num_long = sum(limit is not None and length > limit for length, _ in lengths)
    for length, task_id in lengths:
        check_positions(
            length,
            limit,
            what=f"a sequence of task {task_id!r} with {length} tokens",
            fix=f"{num_long} of {len(lengths)} are too long: set data.max_length = {limit} and data.overlong = "
            '"cut" or "drop", or use a model with more positions',
        )
