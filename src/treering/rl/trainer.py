"""The training half of an RL step: groups of rollouts in, one optimiser update out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from treering.errors import ConfigError
from treering.ranks.group import RankGroup
from treering.rl.advantages import BranchAdvantages
from treering.rl.batch import RlBatch, make_rl_batch, own_tokens, share_of, with_penalties
from treering.rl.collect import Group
from treering.rl.options import RlOptions, known
from treering.train.gradient.router_losses import check_routers
from treering.train.loop.compute import num_threads
from treering.train.loop.distill import check_teacher
from treering.train.loop.optim import OptimOptions
from treering.train.loop.ranks import share_batch
from treering.train.loop.reference import MakeReference, Reference, needs_copy
from treering.train.loop.update import Update, Updater
from treering.train.progress import OnProgress


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """The result of training a step's groups.

    Example: groups with rewards [1, 0] and [1, 1]: one group has zero variance, and 2 rollouts are trained.
    """

    group_advantages: list[BranchAdvantages]
    """Of the branches of each group."""
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
        reference: MakeReference | None = None,
    ) -> None:
        """Puts the model in training mode, with gradient checkpointing as the options say; leaves the teacher as it is.

        Several ranks (`group`, of a prepared model) get the same groups and share them by cost. `reference` is called
        before the first update, and only if `options.kl` needs a model of its own.

        Raises:
            ConfigError: no parameter of the model is trainable, a teacher without `options.distill` or the other way
                round, or `options.kl` without a reference.
            InputError: a teacher of another vocabulary.
            UnsupportedError: router losses for a model without routers, or a model that cannot recompute activations.
        """
        check_routers(model, options.router_losses)
        check_teacher(model, teacher, options.distill)
        self._teacher = teacher
        self._options = options
        self._group = RankGroup() if group is None else group
        self._reference = _reference_of(model, reference, options, self._group)
        self._updater = Updater(model, optim, options.compute, group=self._group, ranks=options.ranks)

    def train(self, step: int, groups: Sequence[Group], *, on_progress: OnProgress | None = None) -> Trained:
        """Updates the weights once, unless every group has equal rewards, and no teacher and no KL counts besides.

        `on_progress` hears how far the gradients are, see `backward`.

        Raises:
            StateError: gradients are not finite; the weights are unchanged.
        """
        with num_threads(self._options.num_train_threads):
            return self._train(step, groups, on_progress)

    def _train(self, step: int, groups: Sequence[Group], on_progress: OnProgress | None) -> Trained:
        options, reference, kl = self._options, self._reference, None
        if reference is not None and options.kl_in == "reward":
            groups, kl = self._penalised(groups, reference)
        in_loss = reference if options.kl_in == "loss" else None
        batch = self._batch(groups, keeps_equal=self._teacher is not None or in_loss is not None)
        update = None
        if batch.trees.num_tasks > 0:
            compute = options.compute
            own = share_of(batch, self._group, compute.costs)
            if in_loss is not None:
                own = replace(own, ref_logprobs=in_loss.logprobs(own.trees, options.sampling.temperature))
            update = self._updater.update(
                step,
                own.trees,
                options.make_objective(own, self._teacher),
                temperature=options.sampling.temperature,
                router_losses=options.router_losses,
                on_progress=on_progress,
            )
            if kl is not None:
                update = replace(update, metrics={**update.metrics, "kl": kl})
        return Trained(
            group_advantages=batch.group_advantages,
            num_rollouts=len(batch.advantages),
            num_zero_variance=batch.num_zero_variance,
            num_empty_groups=batch.num_empty_groups,
            update=update,
        )

    def _penalised(self, groups: Sequence[Group], reference: Reference) -> tuple[list[Group], float]:
        """The groups with the KL in their rewards, and its mean over sampled tokens; ranks score a share each."""
        batch = self._batch(groups, keeps_equal=True)
        compute, old = self._options.compute, known(batch.old_logprobs)
        share = share_batch(batch.trees, self._group, compute.costs)
        scored = reference.logprobs(share.batch, self._options.sampling.temperature)
        counted = own_tokens(groups)
        own = {
            i: float((old[i] - ref)[counted[i]].sum()) for i, ref in zip(share.branches.tolist(), scored, strict=True)
        }
        sums = {i: total for part in self._group.gather(own) for i, total in part.items()}
        num_tokens = sum(int(mask.sum()) for mask in counted)
        penalties = [self._options.kl * sums[i] for i in range(len(sums))]
        return with_penalties(groups, penalties), math.fsum(sums.values()) / max(num_tokens, 1)

    def _batch(self, groups: Sequence[Group], *, keeps_equal: bool) -> RlBatch:
        options = self._options
        return make_rl_batch(
            groups,
            estimator=options.estimator,
            layout=options.layout,
            keeps_equal=keeps_equal,
            normalizer=options.weighting.normalizer,
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


def _reference_of(
    model: nn.Module, make: MakeReference | None, options: RlOptions, group: RankGroup
) -> Reference | None:
    if options.kl == 0:
        return None
    if not needs_copy(model, group.size):
        return Reference(model, None, options.compute)
    if make is None:
        raise ConfigError(
            f"a KL compares with the weights that the run began with, and kl is {options.kl} without `reference`; give "
            "a function that makes them, or set kl=0"
        )
    return Reference(model, make, options.compute)
