"""The training half of an RL step: groups of rollouts in, one optimiser update out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from treering.rl.batch import make_rl_batch
from treering.rl.collect import Group
from treering.rl.options import RlOptions
from treering.train.gradient.router_losses import check_routers
from treering.train.loop.compute import num_threads
from treering.train.loop.optim import OptimOptions
from treering.train.loop.update import Update, Updater


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """What became of a step's groups.

    Example: groups with rewards [1, 0] and [1, 1] have one group of zero variance, and 2 rollouts were trained.
    """

    group_advantages: list[NDArray[np.float64]]
    """float64 [G] for each group."""
    num_rollouts: int
    """Rollouts that the update saw."""
    num_zero_variance: int
    """Groups with rollouts whose rewards are all equal."""
    num_empty_groups: int
    """Groups with no rollout at all."""
    update: Update | None
    """What the update did; None where no group taught anything, and the weights stayed."""


class Trainer:
    """A model with its optimiser and the objective of a run.

    Example:
        >>> trainer = Trainer(model, OptimOptions(learning_rate=1e-5), options)              # doctest: +SKIP
        >>> trainer.train(1, collected.groups).update.loss                                   # doctest: +SKIP
        0.013
    """

    def __init__(self, model: nn.Module, optim: OptimOptions, options: RlOptions) -> None:
        """Puts the model in training mode, with gradient checkpointing as the options say.

        Raises:
            ConfigError: no parameter of the model is trainable.
            UnsupportedError: router losses of a model without routers, or one that cannot recompute activations.
        """
        check_routers(model, options.router_losses)
        self._options = options
        self._updater = Updater(model, optim, options.compute)

    def train(self, step: int, groups: Sequence[Group]) -> Trained:
        """Moves the weights once, unless no group teaches anything.

        Raises:
            StateError: gradients that are not finite; the weights are as they were.
        """
        options = self._options
        batch = make_rl_batch(groups, estimator=options.estimator, layout=options.layout)
        update = None
        if batch.trees.num_tasks > 0:
            objective = options.make_objective(batch)
            with num_threads(options.num_train_threads):
                update = self._updater.update(
                    step,
                    batch.trees,
                    objective,
                    temperature=options.sampling.temperature,
                    router_losses=options.router_losses,
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
        """Continues from a `state` of a trainer over the same parameters.

        Raises:
            StateError: the state is of a model with other parameters.
        """
        self._updater.load_state(dict(state))
