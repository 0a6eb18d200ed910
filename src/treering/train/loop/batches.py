"""Assign training trees to steps: tasks, their order in every epoch, and their forests in each layout.

Everything here is a pure function of the data, a seed and a step number, so a run has no sampler state to save.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from treering.data.image import PlacedImage
from treering.data.trajectory import RenderedTrajectory, TaskId, by_task
from treering.errors import ConfigError, InputError
from treering.tree.forest import Forest
from treering.types import Layout, LossMask, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingTask:
    """One training example: the sequences of one task.

    Attributes:
        task_id: task id of the trajectories in the group.
        sequences: K token sequences, int32 [T] each.
        loss_masks: K masks, bool [T] each, True where a token is trained.
        images: images of each sequence; empty for text.
        routed_experts: routes of each sequence, None for one without; empty if the model chooses everywhere.
        source: name of its file; "" without one.
    """

    task_id: TaskId
    sequences: tuple[TokenIds, ...]
    loss_masks: tuple[LossMask, ...]
    images: tuple[tuple[PlacedImage, ...], ...] = ()
    routed_experts: tuple[NDArray[np.int16] | None, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        shapes = [sequence.shape for sequence in self.sequences], [mask.shape for mask in self.loss_masks]
        if self.images and len(self.images) != len(self.sequences):
            raise InputError(
                f"task {self.task_id!r} has images for {len(self.images)} of {len(self.sequences)} sequences; give "
                "each sequence its own images, () for none"
            )
        if not self.sequences or shapes[0] != shapes[1]:
            raise InputError(
                f"task {self.task_id!r} needs at least one sequence and one mask entry per token, got sequences of "
                f"shapes {shapes[0]} and masks of shapes {shapes[1]}"
            )

    @property
    def num_trained_tokens(self) -> int:
        """Number of trained tokens of all sequences; first tokens do not count, because nothing predicts them."""
        return sum(int(mask[1:].sum()) for mask in self.loss_masks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """Forests of one optimizer step with one mask per branch, in the order of forests, then sequences."""

    num_tasks: int
    forests: list[Forest]
    loss_masks: list[LossMask]


def group_by_task(trajectories: Iterable[RenderedTrajectory], source: str = "") -> list[TrainingTask]:
    """Group trajectories by `task_id` into tasks of the file `source`, in order of first appearance.

    Example: trajectories of the tasks a, b, a give two tasks: a with two sequences, b with one.
    """
    return [
        TrainingTask(
            task_id=group[0].task_id,
            sequences=tuple(member.tokens for member in group),
            loss_masks=tuple(member.loss_mask for member in group),
            images=tuple(member.images for member in group) if any(member.images for member in group) else (),
            routed_experts=tuple(member.routed_experts for member in group),
            source=source,
        )
        for group in by_task(trajectories)
    ]


def task_order(num_tasks: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of the tasks in one epoch: a permutation, int64 [num_tasks], equal on every machine.

    Example: `task_order(4, seed=0, epoch=0)` and `task_order(4, seed=0, epoch=1)` are two unrelated orders of 0 to 3.
    """
    # NumPy guarantees a stable stream of raw words from a bit generator, but not of Generator.permutation.
    words = np.random.Philox(key=seed, counter=[0, 0, 0, epoch]).random_raw(num_tasks)
    return np.argsort(words, kind="stable")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTasks:
    """Assignment of tasks to training steps; steps count from 1, epochs from 0.

    Attributes:
        num_tasks: at least 1.
        trees_per_step: tasks per step; the last step of an epoch has the remainder.
        seed: seed of the order.
    """

    num_tasks: int
    trees_per_step: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_tasks < 1 or self.trees_per_step < 1:
            raise InputError(
                f"training needs at least one task and one tree per step, got {self.num_tasks} and "
                f"{self.trees_per_step}; add data or raise trees_per_step"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps that train every task once."""
        return -(-self.num_tasks // self.trees_per_step)

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step."""
        return (step - 1) // self.steps_per_epoch

    def tasks_of(self, step: int) -> NDArray[np.int64]:
        """Return the indices of the tasks of one step.

        Example: 5 tasks, 2 per step: steps 1, 2 and 3 hold 2, 2 and 1 tasks, and step 4 begins the next epoch.
        """
        order = task_order(self.num_tasks, seed=self.seed, epoch=self.epoch_of(step))
        first = (step - 1) % self.steps_per_epoch * self.trees_per_step
        return order[first : first + self.trees_per_step]


def make_batch(tasks: Sequence[TrainingTask], layout: Layout) -> StepBatch:
    """Build the forests of some tasks; all layouts have the same branches in the same order, so the same gradients.

    Example: tasks with [5, 6, 7] and [5, 6, 8], and with [5, 9], are forests of 4 and 2 tokens as "tree", one of 5 as
    "joined", and three of 3, 3 and 2 as "packed".
    """
    groups = []
    for task in tasks:
        num = len(task.sequences)
        inputs = zip(task.sequences, task.images or [()] * num, task.routed_experts or [None] * num, strict=True)
        groups.append(list(inputs))
    if layout == "packed":
        groups = [[one] for group in groups for one in group]
    elif layout == "joined" and tasks:
        groups = [[one for group in groups for one in group]]
    forests = []
    for group in groups:
        sequences, images, routes = zip(*group, strict=True)
        has_routes = any(own is not None for own in routes)
        forests.append(
            Forest.from_sequences(
                sequences, images=images if any(images) else None, routed_experts=routes if has_routes else None
            )
        )
    return StepBatch(
        num_tasks=len(tasks),
        forests=forests,
        loss_masks=[mask for task in tasks for mask in task.loss_masks],
    )


_TREES_PER_STEP = 8
_STEPS_PER_EPOCH = 16


def step_size(trees_per_step: int | Literal["auto"], num_tasks: int, num_ranks: int) -> int:
    """Return the number of tasks per step; "auto" chooses few enough for a training, and one for each rank.

    Example: "auto" gives 1 tree per step for 30 tasks on one rank, 4 for 64, and 8 for 128 or more.
    """
    if trees_per_step != "auto":
        return trees_per_step
    return min(_TREES_PER_STEP, max(num_ranks, num_tasks // _STEPS_PER_EPOCH, 1))


def check_ranks(layout: Layout, num_ranks: int) -> None:
    """Refuse "joined" on several ranks, which share the trees of a step.

    Raises:
        ConfigError: several ranks with the layout "joined".
    """
    if layout == "joined" and num_ranks > 1:
        raise ConfigError(
            f'layout "joined" makes one tree of a step, and {num_ranks} ranks share the trees of a step; use '
            'layout="tree", or one rank'
        )
