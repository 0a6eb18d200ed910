"""Options of an RL step: what it samples and how it trains."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from torch import nn

from treering.engine.request import Sampling
from treering.engine.rollout import Logprobs
from treering.errors import ConfigError, StateError
from treering.ranks.setup import RanksMode
from treering.rl.advantages import Estimator
from treering.rl.batch import RlBatch, empty_batch
from treering.train import objectives
from treering.train.gradient.router_losses import RouterLosses
from treering.train.loop.batches import Layout, check_layout
from treering.train.loop.compute import ComputeOptions
from treering.train.loop.distill import DistillOptions
from treering.train.loss_weights import Normalizer, Weighting
from treering.train.objectives import Objective
from treering.train.objectives.importance import ImportanceMode
from treering.train.objectives.policy import Clip
from treering.train.objectives.regularizers import KlEstimator

OldLogprobs = Literal["sampled", "recomputed"]
"""Whose log-probs of the policy that sampled are the base of ratios. sampled: `Rollout.policy_logprobs`, the engine's.
recomputed: the trainer's own, of the weights that an update begins with; the same policy at staleness 0."""

KlIn = Literal["loss", "reward"]
"""Where the KL to the reference is. loss: `coefficient * estimate` is added to each trained token's term. reward: each
rollout's reward loses coefficient times the sum of k1 over its sampled tokens."""

ObjectiveName = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "distill"]
"""The policy losses that need no value head, which the loop does not have, and the divergence from a teacher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlOptions:
    """Options of a loop; the defaults are GRPO's.

    Advantages and loss are set separately: Dr. GRPO needs "dr_grpo" as `estimator` and as `objective`, and RLOO "rloo"
    as both.

    Example: `RlOptions(prompts_per_step=8, group_size=8, sampling=Sampling(max_tokens=64))` samples 64 rollouts a step.
    """

    prompts_per_step: int
    """Prompts per step; each is one group and one tree."""
    group_size: int
    """Rollouts per prompt and step, at least 2."""
    sampling: Sampling
    """Sampling parameters; the loop adds the task's stop tokens and strings."""
    estimator: Estimator = "grpo"
    """Advantage estimator, see `group_advantages`."""
    objective: ObjectiveName = "grpo"
    """The loss."""
    clip: Clip | None = None
    """(low, high); None uses the objective's default."""
    normalizer: Normalizer | None = None
    """Denominator of the loss; None uses the objective's default."""
    divisor: float | None = None
    """Divisor of the constant normaliser."""
    max_importance: float | None = None
    """Cap of importance weights, for sampling with top-k or top-p; None applies no weights."""
    min_importance: float | None = None
    """Lower bound of masked importance weights; needs `max_importance`."""
    importance: ImportanceMode | None = None
    """Which weights are bounded, and how; None truncates token weights. Needs `max_importance`."""
    old_logprobs: OldLogprobs = "sampled"
    """See `OldLogprobs`; "recomputed" for an engine that gives no `policy_logprobs`."""
    entropy_coefficient: float | None = None
    """Factor of the entropy bonus; 0 only measures the entropy, None skips it (saves passes over the logits)."""
    kl: float = 0.0
    """Factor of the KL to the policy that the run began with; 0 has no reference. In the loss, groups with equal
    rewards are trained too."""
    kl_in: KlIn = "loss"
    """See `KlIn`."""
    kl_estimator: KlEstimator | None = None
    """None: "k3" in the loss, "k1" in the reward. Refused is "k1" in the loss, whose gradient is 0 on average, and any
    other in the reward, where the gradient is not that of a KL (near the reference it vanishes)."""
    distill: DistillOptions | None = None
    """Of a loop with a teacher: without a weight for the loss "distill", with one for a divergence beside another loss.
    All groups are trained then, those with equal rewards too."""
    router_losses: RouterLosses | None = None
    """Router losses of a mixture of experts; None adds none."""
    layout: Layout = "tree"
    """"tree", or "packed" to train every sequence separately (the off-switch)."""
    compute: ComputeOptions = field(default_factory=ComputeOptions)
    """Memory, time and precision of training."""
    num_train_threads: int | None = None
    """Torch threads while training; None leaves them unchanged. The engine has its own setting."""
    ranks: RanksMode | None = None
    """How several ranks keep step, see `treering.backward`; None for one rank, or its default."""
    seed: int = 0
    """Seed of the prompt order."""

    def __post_init__(self) -> None:
        for name, least in (("prompts_per_step", 1), ("group_size", 2)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is at least {least}, got {getattr(self, name)}; raise it")
        if self.num_train_threads is not None and self.num_train_threads < 1:
            raise ConfigError(f"num_train_threads is at least 1, got {self.num_train_threads}; None sets no limit")
        for name, allowed in (
            ("objective", ObjectiveName),
            ("estimator", Estimator),
            ("old_logprobs", OldLogprobs),
        ):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(
                    f"{name} is one of {', '.join(get_args(allowed))}, got {getattr(self, name)!r}; choose one"
                )
        check_kl(self)
        is_alone = self.distill is not None and self.distill.weight is None
        if (self.objective == "distill") != is_alone:
            raise ConfigError(
                'objective="distill" trains the divergence alone, and needs distill=DistillOptions(...) without a '
                f"weight; got {self.objective!r} with {self.distill}"
            )
        # The objective refuses wrong clips, divisors and caps: build one now, not after the first rollouts.
        weighting = self.weighting
        check_layout(self.layout, normalizer=weighting.normalizer, shared=weighting.shared)

    @property
    def weighting(self) -> Weighting:
        """How the terms of the loss are combined."""
        return self.make_objective(empty_batch()).weighting

    def make_objective(self, batch: RlBatch, teacher: nn.Module | None = None) -> Objective:
        """The loss over the branches of a batch; the divergence from the teacher is part of it where one is given."""
        plain = self._policy_objective(batch)
        return plain if teacher is None or self.distill is None else self.distill.objective(teacher, plain)

    def _policy_objective(self, batch: RlBatch) -> Objective:
        if self.objective == "distill":
            # Stands for its masks and weighting alone.
            return objectives.sft(batch.trees.loss_masks, self.normalizer or "token_mean", divisor=self.divisor)
        own: dict[str, Any] = {
            "clip": self.clip,
            "normalizer": self.normalizer,
            "divisor": self.divisor,
            "entropy_coefficient": self.entropy_coefficient,
            **self._importance(batch),
            **self._kl(batch),
        }
        make = getattr(objectives, self.objective)
        objective: Objective = make(
            batch.advantages,
            batch.trees.loss_masks,
            known(batch.old_logprobs) if self.old_logprobs == "sampled" else None,
            **{name: value for name, value in own.items() if value is not None},
        )
        return objective

    def _kl(self, batch: RlBatch) -> dict[str, Any]:
        if batch.ref_logprobs is None:
            return {}
        return {
            "ref_logprobs": batch.ref_logprobs,
            "kl_coefficient": self.kl,
            "kl_estimator": self.kl_estimator or "k3",
        }

    def _importance(self, batch: RlBatch) -> dict[str, Any]:
        names = ("importance", "min_importance", "max_importance")
        bounds = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {"behaviour_logprobs": batch.behaviour_logprobs, **bounds} if bounds else {}


def check_kl(options: RlOptions) -> None:
    """Refuses a KL that would not pull the policy towards its reference.

    Raises:
        ConfigError: names the rule.
    """
    place, estimator = options.kl_in, options.kl_estimator
    if place not in get_args(KlIn) or estimator not in (None, *get_args(KlEstimator)):
        raise ConfigError(
            f"kl_in is one of {', '.join(get_args(KlIn))} and kl_estimator one of {', '.join(get_args(KlEstimator))}, "
            f"got {place!r} and {estimator!r}; choose from these"
        )
    if not 0 <= options.kl < float("inf"):
        raise ConfigError(f"kl is a finite factor of at least 0, got {options.kl}; 0 has no reference")
    if estimator is not None and (place == "reward") != (estimator == "k1"):
        raise ConfigError(
            "in the loss k1 has a mean gradient of 0, and in the reward k1 alone has the gradient of the KL, got "
            f'kl_in="{place}" with kl_estimator="{estimator}": take "k2" or "k3" in the loss, or "k1" in the reward'
        )
    if options.kl == 0:
        return
    if options.objective == "distill":
        raise ConfigError(f'objective="distill" has a teacher and no policy loss, got kl={options.kl}; set kl=0')
    if place == "reward" and options.old_logprobs == "recomputed":
        raise ConfigError(
            'a KL in the reward reads the log-probs of the engine, and old_logprobs="recomputed" is for engines '
            'without them; take kl_in="loss"'
        )


def known(old_logprobs: list[Logprobs]) -> list[Logprobs]:
    """The log-probs, unless an engine could not give them.

    Raises:
        StateError: some are NaN.
    """
    num_unknown = sum(int(np.isnan(values).sum()) for values in old_logprobs)
    if num_unknown > 0:
        raise StateError(
            f"ratios need the policy's log-prob of every token, and the engine gave none for {num_unknown} tokens; set "
            'old_logprobs="recomputed"'
        )
    return old_logprobs
