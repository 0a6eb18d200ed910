"""What all policy losses share: masks, old log-probs, and the options added around each loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from treering.errors import ConfigError, InputError
from treering.train.branch_values import BranchValues
from treering.train.loss_weights import Weighting
from treering.train.objective import Entries, Need, Objective, Scope, Terms
from treering.train.objectives.importance import Importance, make_importance
from treering.train.objectives.options import PolicyOptions, check_names
from treering.train.objectives.regularizers import Regularizers, estimate_kl, make_regularizers
from treering.train.objectives.surrogate import Clip, check_clip, clipped_surrogate

Surrogate = Callable[[Entries, Tensor, Tensor], Terms]
"""(entries, old log-probs [F], advantages [F]) -> terms."""

_PER_TOKEN = frozenset({"old_logprobs", "behaviour_logprobs", "ref_logprobs", "old_values"})
"""One number per sequence is refused for these: it could mean the sequence's sum or each token's value."""

_COMMON = ("advantages", "loss_masks", "old_logprobs", "clip", "normalizer", "shared", "divisor")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLoss:
    """The parts of a policy loss.

    Attributes:
        name: of the objective.
        advantages: K numbers, or K lists with one number per token.
        loss_masks: K masks; required.
        old_logprobs: K lists, or None for the current policy's own.
        weighting: normaliser and sharing convention.
        surrogate: the loss of each entry, without the shared options.
        scope: which entries the surrogate must see together.
        values: more per-branch data that it reads; None values are dropped.
        needs: model outputs that it reads in addition to log-probs.
        arguments: names of arguments that only this loss has.
    """

    name: str
    advantages: BranchValues
    loss_masks: BranchValues
    old_logprobs: BranchValues | None
    weighting: Weighting
    surrogate: Surrogate
    scope: Scope = "entry"
    values: Mapping[str, BranchValues | None] = field(default_factory=dict)
    needs: frozenset[Need] = frozenset()
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.loss_masks is None:
            raise InputError(f"{self.name} needs loss_masks: which tokens did the policy sample?")
        if self.advantages is None:
            raise InputError(f"{self.name} needs advantages: one number per sequence, or one per token")


def clipped(clip: Clip) -> Surrogate:
    """The clipped surrogate, per token.

    Raises:
        ConfigError: an invalid clip.
    """
    check_clip(clip)
    return lambda entries, old, advantages: clipped_surrogate(entries.logprobs, old, advantages, clip=clip)


def make_objective(policy: PolicyLoss, options: PolicyOptions) -> Objective:
    """The objective of a policy loss with the shared options.

    Raises:
        ConfigError: an unknown option, a missing one that another needs, or an unsupported sharing convention.
    """
    check_names(policy.name, options, own=(*_COMMON, *policy.arguments))
    importance = _importance(options)
    regularizers = _regularizers(options)
    scope = "branch" if importance is not None and importance.is_of_sequences else policy.scope
    if scope == "branch":
        refuse_once(policy.name, policy.weighting)
    of_options: frozenset[Need] = frozenset() if regularizers.entropy_coefficient is None else frozenset({"entropy"})

    def terms(entries: Entries) -> Terms:
        old = entries.values.get("old_logprobs", entries.logprobs.detach())
        plain = policy.surrogate(entries, old, entries.values["advantages"])
        weighted = plain if importance is None else _weighted(plain, importance, entries, old)
        return _regularized(weighted, regularizers, entries)

    return Objective(
        name=policy.name,
        weighting=policy.weighting,
        terms=terms,
        loss_masks=policy.loss_masks,
        values=_values(policy, options),
        scope=scope,
        needs=policy.needs | of_options,
        per_token=_PER_TOKEN,
    )


def refuse_once(name: str, weighting: Weighting) -> None:
    """Refuses the convention `once` for losses whose terms depend on the whole sequence.

    Raises:
        ConfigError: shared="once".
    """
    if weighting.shared == "once":
        raise ConfigError(
            f'{name} takes shared="sum" only here: its ratio is that of a whole sequence, so a token that sequences '
            'share has no term of its own that could count once; got shared="once"'
        )


def _importance(options: PolicyOptions) -> Importance | None:
    return make_importance(
        behaviour_logprobs=options.get("behaviour_logprobs"),
        max_importance=options.get("max_importance"),
        min_importance=options.get("min_importance"),
        mode=options.get("importance"),
    )


def _regularizers(options: PolicyOptions) -> Regularizers:
    return make_regularizers(
        ref_logprobs=options.get("ref_logprobs"),
        kl_coefficient=options.get("kl_coefficient"),
        kl_estimator=options.get("kl_estimator"),
        entropy_coefficient=options.get("entropy_coefficient"),
    )


def _values(policy: PolicyLoss, options: PolicyOptions) -> dict[str, BranchValues]:
    named: dict[str, Any] = {
        "advantages": policy.advantages,
        "old_logprobs": policy.old_logprobs,
        "behaviour_logprobs": options.get("behaviour_logprobs"),
        "ref_logprobs": options.get("ref_logprobs"),
        **policy.values,
    }
    return {name: items for name, items in named.items() if items is not None}


def _weighted(plain: Terms, importance: Importance, entries: Entries, old: Tensor) -> Terms:
    behaviour = entries.values["behaviour_logprobs"]
    weights = importance.weights(old, behaviour, branch=entries.branch, num_branches=entries.num_branches)
    return Terms(loss=weights * plain.loss, metrics={**plain.metrics, "importance": weights})


def _regularized(plain: Terms, regularizers: Regularizers, entries: Entries) -> Terms:
    loss, metrics = plain.loss, dict(plain.metrics)
    if regularizers.kl_coefficient is not None:
        reference = entries.values["ref_logprobs"]
        kl = estimate_kl(entries.logprobs, reference, estimator=regularizers.kl_estimator)
        loss = loss + regularizers.kl_coefficient * kl
        metrics["kl"] = kl.detach()
    if regularizers.entropy_coefficient is not None:
        assert entries.entropy is not None
        loss = loss - regularizers.entropy_coefficient * entries.entropy
        metrics["entropy"] = entries.entropy.detach()
    return Terms(loss=loss, metrics=metrics)
