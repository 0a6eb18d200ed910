"""The training half of an RL step: groups of rollouts in, one optimiser update out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from treering.ranks.group import RankGroup
from treering.rl.batch import make_rl_batch, share_of
from treering.rl.collect import Group
from treering.rl.options import RlOptions
from treering.train.gradient.router_losses import check_routers
from treering.train.loop.compute import num_threads
from treering.train.loop.distill import check_teacher
from treering.train.loop.optim import OptimOptions
from treering.train.loop.update import Update, Updater
from treering.train.progress import OnProgress


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """The result of training a step's groups.

    Example: groups with rewards [1, 0] and [1, 1]: one group has zero variance, and 2 rollouts are trained.
    """

    group_advantages: list[NDArray[np.float64]]
    """float64 [G] for each group."""
    num_rollouts: int
    """Trained rollouts."""
    num_zero_variance: int
    """Groups whose rewards are all equal."""
    num_empty_groups: int
    """Groups without any rollout."""
    update: Update | None
    """The update; None if every group had equal rewards, and the weights stayed."""


class Trainer:
    """A model with its optimiser and the objective of a run.

    Example:
        >>> trainer = Trainer(model, OptimOptions(learning_rate=1e-5), options)              # doctest: +SKIP
        >>> trainer.train(1, collected.groups).update.loss                                   # doctest: +SKIP
        0.013
    """

    def __init__(
        self,
        model: nn.Module,
        optim: OptimOptions,
        options: RlOptions,
        teacher: nn.Module | None = None,
        group: RankGroup | None = None,
    ) -> None:
        """Puts the model in training mode, with gradient checkpointing as the options say; leaves the teacher as it is.

        Several ranks (`group`, of a prepared model) get the same groups and share them by cost.

        Raises:
            ConfigError: no parameter of the model is trainable, or a teacher without `options.distill` or the other way
                round.
            InputError: a teacher of another vocabulary.
            UnsupportedError: router losses for a model without routers, or a model that cannot recompute activations.
        """
        check_routers(model, options.router_losses)
        check_teacher(model, teacher, options.distill)
        self._teacher = teacher
        self._options = options
        self._group = RankGroup() if group is None else group
        self._updater = Updater(model, optim, options.compute, group=self._group, ranks=options.ranks)

    def train(self, step: int, groups: Sequence[Group], *, on_progress: OnProgress | None = None) -> Trained:
        """Updates the weights once, unless every group has equal rewards and there is no teacher.

        `on_progress` hears how far the gradients are, see `backward`.

        Raises:
            StateError: gradients are not finite; the weights are unchanged.
        """
        options = self._options
        batch = make_rl_batch(
            groups, estimator=options.estimator, layout=options.layout, keeps_equal=self._teacher is not None
        )
        update = None
        if batch.trees.num_tasks > 0:
            own = share_of(batch, self._group, options.compute.max_tokens_on_ranks, options.compute.costs)
            objective = options.make_objective(own, self._teacher)
            with num_threads(options.num_train_threads):
                update = self._updater.update(
                    step,
                    own.trees,
                    objective,
                    temperature=options.sampling.temperature,
                    router_losses=options.router_losses,
                    on_progress=on_progress,
                )
        return Trained(
            group_advantages=batch.group_advantages,
            num_rollouts=len(batch.advantages),
            num_zero_variance=batch.num_zero_variance,
            num_empty_groups=batch.num_empty_groups,
            update=update,
        )

    def state(self) -> dict[str, Any]:
        """The optimiser's state, all tensors and numbers."""
        return self._updater.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from a `state` of a trainer over the same parameters.

        Raises:
            StateError: the state belongs to a model with other parameters.
        """
        self._updater.load_state(dict(state))
