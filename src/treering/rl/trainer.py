"""The training half of an RL step: groups of rollouts in, one optimiser update out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from torch import nn

from treering.config.optim import OptimOptions
from treering.config.rl_options import RlOptions
from treering.engine.protocol import Logprobs
from treering.errors import ConfigError, StateError, plural
from treering.ranks.group import RankGroup
from treering.rl.advantages import BranchAdvantages
from treering.rl.batch import RlBatch, make_rl_batch, overlong_penalties, share_of, with_penalties
from treering.rl.collect import Group
from treering.train.branch_logprobs import branch_logprobs
from treering.train.loop.batches import check_ranks
from treering.train.loop.compute import num_threads, precision, share_batch, tokens_on_ranks
from treering.train.loop.other_models import MakeReference, Reference, check_teacher, distill_objective, needs_copy
from treering.train.loop.update import Update, Updater, combined
from treering.train.objective import Objective, Weighting
from treering.train.objectives import find_objective
from treering.train.objectives.sft import sft
from treering.train.progress import OnProgress
from treering.train.router_losses import check_routers


def weighting_of(options: RlOptions) -> Weighting:
    """Return how the terms of the loss are combined.

    Raises:
        ConfigError: the objective refuses a clip or a cap.
    """
    return make_objective(options, make_rl_batch([], estimator="grpo", layout="tree")).weighting


def make_objective(options: RlOptions, batch: RlBatch, teacher: nn.Module | None = None) -> Objective:
    """Return the loss over the branches of a batch; with a teacher, the divergence from it is part of the loss."""
    plain = _policy_objective(options, batch)
    return plain if teacher is None or options.distill is None else distill_objective(options.distill, teacher, plain)


def _policy_objective(options: RlOptions, batch: RlBatch) -> Objective:
    if options.objective == "distill":
        # Stands for its masks and weighting only.
        return sft(batch.trees.loss_masks, **options.weighting)
    own: dict[str, Any] = {
        "clip": options.clip,
        **options.weighting,
        "entropy_coefficient": options.entropy_coefficient,
    }
    if options.max_importance is not None:
        own |= {"behaviour_logprobs": batch.behaviour_logprobs, "max_importance": options.max_importance}
    if batch.ref_logprobs is not None:
        own |= {"ref_logprobs": batch.ref_logprobs, "kl_coefficient": options.kl, "kl_estimator": "k3"}
    objective: Objective = find_objective(options.objective)(
        batch.advantages,
        batch.trees.loss_masks,
        known(batch.old_logprobs) if options.old_logprobs == "sampled" or options.num_updates > 1 else None,
        **{name: value for name, value in own.items() if value is not None},
    )
    return objective


def known(old_logprobs: list[Logprobs]) -> list[Logprobs]:
    """Return the log-probs if the engine gave all of them.

    Raises:
        StateError: some are NaN.
    """
    num_unknown = sum(int(np.isnan(values).sum()) for values in old_logprobs)
    if num_unknown > 0:
        raise StateError(
            f"policy ratios need every token's log-prob, and the engine gave none for "
            f'{plural(num_unknown, "token")}; set old_logprobs="recomputed"'
        )
    return old_logprobs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """Result of training a step's groups."""

    group_advantages: list[BranchAdvantages]
    """Advantages of the branches of each group."""
    num_rollouts: int
    """Trained rollouts."""
    num_zero_variance: int
    """Groups whose rewards are all equal."""
    num_empty_groups: int
    """Groups without any rollout."""
    update: Update | None
    """The update, or several combined; None if every group had equal rewards and the weights stayed."""


class Trainer:
    """Trains a model with an optimiser and the objective of a run."""

    def __init__(
        self,
        model: nn.Module,
        optim: OptimOptions,
        options: RlOptions,
        teacher: nn.Module | None = None,
        rank_group: RankGroup | None = None,
        reference: MakeReference | None = None,
    ) -> None:
        """Put the model in training mode, with gradient checkpointing if the options ask for it.

        The ranks of `rank_group` train a prepared model; they get the same groups and share them by cost. `reference`
        is called before the first update, and only if `options.kl` needs a separate model. The teacher stays as it is.

        Raises:
            ConfigError: no parameter is trainable, only one of teacher and `options.distill` is given, or `options.kl`
                has no reference.
            InputError: the teacher has another vocabulary.
            UnsupportedError: router losses for a model without routers, or a model that cannot recompute activations.
        """
        check_routers(model, options.router_losses)
        check_teacher(model, teacher, options)
        if (options.objective == "distill") != (options.distill is not None and options.distill.weight is None):
            raise ConfigError(
                'objective = "distill" trains only the divergence, and needs distill=DistillOptions(...) without a '
                f'weight; got "{options.objective}" with distill={options.distill}'
            )
        # Let the objective refuse wrong clips and caps now, before the first rollouts.
        self._weighting = weighting_of(options)
        self._teacher = teacher
        self._options = options
        self._rank_group = RankGroup() if rank_group is None else rank_group
        check_ranks(options.layout, self._rank_group.size)
        is_copied = needs_copy(model, self._rank_group.size)
        if options.kl != 0 and is_copied and reference is None:
            raise ConfigError(
                f"kl={options.kl} compares with the run's initial weights and needs `reference`; pass a function that "
                "makes the reference model, or set kl=0"
            )
        self._reference = None if options.kl == 0 else Reference(model, reference if is_copied else None, options)
        self._model = model
        self._is_between_updates = False
        self._updater = Updater(model, optim, options, rank_group=self._rank_group)

    def train(self, step: int, groups: Sequence[Group], *, on_progress: OnProgress | None = None) -> Trained:
        """Update the weights, unless every group has equal rewards and the loss has no teacher and no KL.

        `on_progress` receives the progress of the first update's gradients (see `backward`) and may end the step; after
        that update nothing can end it.

        Raises:
            StateError: gradients are not finite; the weights are those before the failed update.
        """
        with num_threads(self._options.num_train_threads, self._model):
            return self._train(step, groups, on_progress)

    def _train(self, step: int, groups: Sequence[Group], on_progress: OnProgress | None) -> Trained:
        options, reference, kl = self._options, self._reference, None
        groups = self._shaped(groups)
        if reference is not None and options.kl_in == "reward":
            groups, kl = self._penalised(groups, reference)
        in_loss = reference if options.kl_in == "loss" else None
        keeps_equal = (self._teacher is not None or in_loss is not None) and options.max_gen_batches == 1
        batch = self._batch(groups, keeps_equal=keeps_equal)
        update = None
        if batch.trees.num_tasks > 0:
            # Score all parts before the first update.
            parts = [self._scored(part, in_loss) for part in self._minibatches(batch)]
            update = combined(self._update(step, parts, on_progress))
            if kl is not None:
                update = replace(update, metrics={**update.metrics, "kl": kl})
        return Trained(
            group_advantages=batch.group_advantages,
            num_rollouts=len(batch.advantages),
            num_zero_variance=batch.num_zero_variance,
            num_empty_groups=batch.num_empty_groups,
            update=update,
        )

    def _shaped(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Return the groups with the length penalty in their rewards."""
        options = self._options
        if options.overlong_buffer is None:
            return groups
        penalties = overlong_penalties(groups, max_tokens=options.sampling.max_tokens, buffer=options.overlong_buffer)
        return with_penalties(groups, penalties)

    def differs(self, group: Group) -> bool:
        """Return whether a group's rewards, with the length penalty, differ, so that some advantages are not 0."""
        return bool(self._batch(self._shaped([group]), keeps_equal=False).trained)

    def _minibatches(self, batch: RlBatch) -> list[RlBatch]:
        """Split a batch into parts that get one update each."""
        num_parts = min(self._options.num_minibatches, len(batch.trained))
        if num_parts == 1:
            return [batch]
        edges = [len(batch.trained) * i // num_parts for i in range(num_parts + 1)]
        return [self._batch(batch.trained[start:stop], keeps_equal=True) for start, stop in pairwise(edges)]

    def _scored(self, batch: RlBatch, reference: Reference | None) -> RlBatch:
        """Return this rank's share, with log-probs of the reference and of the policy before its updates if needed."""
        options = self._options
        own = share_of(batch, self._rank_group)
        if reference is not None:
            own = replace(own, ref_logprobs=reference.logprobs(own.trees, options.sampling.temperature))
        if options.num_updates == 1 or options.old_logprobs == "sampled":
            return own
        with precision(self._model, options.autocast):
            old = branch_logprobs(
                self._model,
                own.trees.forests,
                own.trees.loss_masks,
                max_tokens=tokens_on_ranks(options),
                temperature=options.sampling.temperature,
                backend=options.backend,
                rank_group=self._rank_group,
            )
        return replace(own, old_logprobs=old)

    def _update(self, step: int, parts: Sequence[RlBatch], on_progress: OnProgress | None) -> list[Update]:
        """Update once per part and iteration."""
        options, updates = self._options, list[Update]()
        for part in [*parts] * options.num_iterations:
            update = self._updater.update(
                step,
                part.trees,
                make_objective(options, part, self._teacher),
                temperature=options.sampling.temperature,
                router_losses=options.router_losses,
                on_progress=None if updates else on_progress,
            )
            updates.append(update)
            self._is_between_updates = len(updates) < len(parts) * options.num_iterations
        return updates

    def _penalised(self, groups: Sequence[Group], reference: Reference) -> tuple[list[Group], float]:
        """Return the groups with the KL in their rewards, and its mean per sampled token; ranks score a share each."""
        batch = self._batch(groups, keeps_equal=True)
        old = known(batch.old_logprobs)
        share = share_batch(batch.trees, self._rank_group)
        scored = reference.logprobs(share.batch, self._options.sampling.temperature)
        counted = batch.trees.loss_masks
        own = {
            i: float((old[i] - ref)[counted[i]].sum()) for i, ref in zip(share.branches.tolist(), scored, strict=True)
        }
        sums = {i: total for part in self._rank_group.gather(own) for i, total in part.items()}
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
            normalizer=self._weighting.normalizer,
        )

    def state(self) -> dict[str, Any]:
        """Return the optimiser's state, all tensors and numbers.

        Raises:
            StateError: an error ended the latest step after some of its updates.
        """
        if self._is_between_updates:
            raise StateError(
                "only whole steps are saved, and a step failed between its updates; resume from a checkpoint"
            )
        return self._updater.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state` of a trainer over the same parameters.

        Raises:
            StateError: the state belongs to a model with other parameters.
        """
        self._updater.load_state(dict(state))
