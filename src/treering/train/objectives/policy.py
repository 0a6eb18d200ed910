"""What all policy losses share: masks, old log-probs, and the options added around each loss."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from treering.errors import ConfigError, InputError
from treering.train.branch_values import BranchValues
from treering.train.loss_weights import Weighting
from treering.train.objective import Entries, Need, Objective, Scope, Terms
from treering.train.objectives.importance import Importance
from treering.train.objectives.options import PolicyOptions, check_names, importance_of, regularizers_of
from treering.train.objectives.regularizers import MAX_LOG_RATIO, Regularizers, estimate_kl

Clip = tuple[float, float]
"""(low, high): the ratio is clipped to [1 - low, 1 + high]."""


def surrogate_of_ratio(log_ratio: Float[Tensor, " F"], advantages: Float[Tensor, " F"], *, clip: Clip) -> Terms:
    """PPO's clipped surrogate -min(r A, clip(r) A), for ratios r of tokens or sequences, with its usual metrics.

    (arXiv 1707.06347, equation 7.) Metrics: ratio; approx_kl = r - 1 - log r, which estimates KL(old, new); clip_low
    and clip_high, the share of entries whose gradient the lower or upper clip removes.

    Example: log r = 0.5 (r = 1.649) and A = 2 with clip (0.2, 0.2) give -min(3.297, 2.4) = -2.4.
    """
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    low, high = clip
    clipped = ratio.clamp(1 - low, 1 + high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    with torch.no_grad():
        metrics = {
            **ratio_metrics(log_ratio),
            "clip_low": ((ratio < 1 - low) & (advantages < 0)).to(ratio.dtype),
            "clip_high": ((ratio > 1 + high) & (advantages > 0)).to(ratio.dtype),
        }
    return Terms(loss=loss, metrics=metrics)


def ratio_metrics(log_ratio: Float[Tensor, " F"]) -> dict[str, Float[Tensor, " F"]]:
    """The ratio r and r - 1 - log r, without gradients."""
    constant = log_ratio.detach()
    return {"ratio": constant.exp(), "approx_kl": torch.expm1(constant) - constant}


def check_clip(clip: Clip) -> None:
    """Raises ConfigError unless 0 <= low <= 1 and 0 <= high, both finite."""
    is_pair = isinstance(clip, tuple | list) and len(clip) == 2 and all(isinstance(x, int | float) for x in clip)
    if not is_pair or not (0 <= clip[0] <= 1 and 0 <= clip[1] < float("inf")):
        raise ConfigError(f"clip must be (low, high) with 0 <= low <= 1 and high >= 0, got {clip!r}")


Surrogate = Callable[[Entries, Tensor, Tensor], Terms]
"""(entries, old log-probs [F], advantages [F]) -> terms."""

_PER_TOKEN = frozenset({"old_logprobs", "behaviour_logprobs", "ref_logprobs"})
"""One number per sequence is refused for these: it could mean the sequence's sum or each token's value."""

_COMMON = ("advantages", "loss_masks", "old_logprobs", "clip", "normalizer", "shared", "divisor")


def clipped(clip: Clip) -> Surrogate:
    """The clipped surrogate, per token.

    Raises:
        ConfigError: an invalid clip.
    """
    check_clip(clip)
    return lambda entries, old, advantages: surrogate_of_ratio(entries.logprobs - old, advantages, clip=clip)


def policy_objective(
    name: str,
    surrogate: Surrogate,
    options: PolicyOptions,
    *,
    advantages: BranchValues,
    loss_masks: BranchValues,
    old_logprobs: BranchValues | None,
    weighting: Weighting,
    scope: Scope = "entry",
    returns: BranchValues | None = None,
    old_values: BranchValues | None = None,
    arguments: tuple[str, ...] = (),
) -> Objective:
    """The objective of a policy loss with the shared options.

    Args:
        name: of the objective.
        surrogate: the loss of each entry, without the shared options.
        options: see `PolicyOptions`.
        advantages: K numbers, or K lists with one number per token.
        loss_masks: K masks; required.
        old_logprobs: K lists, or None for the current policy's own.
        weighting: normaliser and sharing convention.
        scope: which entries the surrogate must see together.
        returns: of a loss that reads values.
        old_values: likewise.
        arguments: names of arguments that only this loss has.

    Raises:
        InputError: no masks or no advantages.
        ConfigError: an unknown option, a missing one that another needs, or an unsupported sharing convention.
    """
    if loss_masks is None:
        raise InputError(f"{name} needs loss_masks: which tokens did the policy sample?")
    if advantages is None:
        raise InputError(f"{name} needs advantages: one number per sequence, or one per token")
    check_names(name, options, own=(*_COMMON, *arguments))
    importance, regularizers = importance_of(options), regularizers_of(options)
    if importance is not None and importance.is_of_sequences:
        scope = "branch"
    if scope == "branch":
        refuse_once(name, weighting)
    needs: dict[Need, object] = {"entropy": regularizers.entropy_coefficient, "value": returns}

    def terms(entries: Entries) -> Terms:
        old = entries.values.get("old_logprobs", entries.logprobs.detach())
        plain = surrogate(entries, old, entries.values["advantages"])
        weighted = plain if importance is None else _weighted(plain, importance, entries, old)
        return _regularized(weighted, regularizers, entries)

    values: dict[str, BranchValues | None] = {
        "advantages": advantages,
        "old_logprobs": old_logprobs,
        "behaviour_logprobs": options.get("behaviour_logprobs"),
        "ref_logprobs": options.get("ref_logprobs"),
        "returns": returns,
        "old_values": old_values,
    }
    return Objective(
        name=name,
        weighting=weighting,
        terms=terms,
        loss_masks=loss_masks,
        values={key: items for key, items in values.items() if items is not None},
        scope=scope,
        needs=frozenset(key for key, asked in needs.items() if asked is not None),
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
