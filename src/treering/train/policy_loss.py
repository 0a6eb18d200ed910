"""Parts shared by all policy losses: clipped surrogate, importance weights, KL penalty and entropy bonus.

F flat entries
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from treering.errors import ConfigError, InputError
from treering.train.objective import (
    BranchValues,
    Entries,
    Need,
    Objective,
    Scope,
    Terms,
    Weighting,
    branch_sizes,
    branch_sums,
    checked_terms,
)

Clip = tuple[float, float]
"""(low, high): the ratio is clipped to [1 - low, 1 + high]."""

Surrogate = Callable[[Entries, Tensor, Tensor], Terms]
"""(entries, old log-probs [F], advantages [F]) -> terms."""

MAX_LOG_RATIO = 60.0
"""Bound on log-ratios: there the ratio (1e26) is still finite in float32. An infinite ratio would make gradients NaN
even where the clip removes them."""


def surrogate_of_ratio(log_ratio: Float[Tensor, " F"], advantages: Float[Tensor, " F"], *, clip: Clip) -> Terms:
    """Return PPO's clipped surrogate -min(r A, clip(r) A), for ratios r of tokens or sequences, with its usual metrics.

    See arXiv 1707.06347, equation 7. Metrics: ratio; approx_kl = r - 1 - log r, which estimates KL(old, new); clip_low
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
    """Return the ratio r and r - 1 - log r, without gradients."""
    constant = log_ratio.detach()
    return {"ratio": constant.exp(), "approx_kl": torch.expm1(constant) - constant}


def check_clip(clip: Clip) -> None:
    """Raise ConfigError unless 0 <= low <= 1 and 0 <= high, both finite."""
    is_pair = isinstance(clip, tuple | list) and len(clip) == 2 and all(isinstance(x, int | float) for x in clip)
    if not is_pair or not (0 <= clip[0] <= 1 and 0 <= clip[1] < float("inf")):
        raise ConfigError(f"clip must be (low, high) with 0 <= low <= 1 and high >= 0, got {clip!r}")


def clipped(clip: Clip) -> Surrogate:
    """Return the per-token clipped surrogate.

    Raises:
        ConfigError: an invalid clip.
    """
    check_clip(clip)
    return lambda entries, old, advantages: surrogate_of_ratio(entries.logprobs - old, advantages, clip=clip)


def num_trained(entries: Entries) -> Float[Tensor, " F"]:
    """Return, for each entry, the number of trained entries of its branch."""
    return branch_sizes(entries.branch, entries.num_branches, like=entries.logprobs)[entries.branch]


def own_log_ratio(entries: Entries) -> Float[Tensor, " F"]:
    """Return 0 at each entry, with a gradient of 1 in the entry's own log-prob."""
    return entries.logprobs - entries.logprobs.detach()


ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
"""Ratio to bound, and how. token: the ratio of each token. sequence: the product over the trained tokens of a branch,
used for each of them. truncate: a ratio above the cap becomes the cap. mask: a ratio outside the bounds becomes 0."""

MAX_LOG_IMPORTANCE = 20.0
"""Bound on log-weights, as in verl: 5e8 is above any cap in use and finite in every float format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Importance weights exp(target log-prob - behaviour log-prob), detached, with their bounds.

    Names and the product over a sequence follow TRL; verl calls the modes `token` and `sequence`, truncated or
    rejected.

    Attributes:
        max_importance: cap, or upper bound of a mask; positive, may be infinite.
        min_importance: lower bound of a mask; 0 for no bound.
        mode: see `ImportanceMode`.
    """

    max_importance: float
    min_importance: float = 0.0
    mode: ImportanceMode = "token_truncate"

    def __post_init__(self) -> None:
        if self.mode not in get_args(ImportanceMode):
            raise ConfigError(f"importance must be one of {', '.join(get_args(ImportanceMode))}, got {self.mode!r}")
        if not _is_number(self.max_importance) or self.max_importance <= 0:
            raise ConfigError(f"max_importance must be a positive number, got {self.max_importance!r}; 2.0 is common")
        if not _is_number(self.min_importance) or not 0 <= self.min_importance <= self.max_importance:
            raise ConfigError(
                f"min_importance must be a number from 0 to max_importance={self.max_importance}, got "
                f"{self.min_importance!r}; 0.5 is common"
            )
        if self.min_importance > 0 and not self.mode.endswith("_mask"):
            raise ConfigError(
                f"min_importance applies to masks only, and importance={self.mode!r} only caps; remove min_importance, "
                "or set importance to token_mask or sequence_mask"
            )

    @property
    def is_of_sequences(self) -> bool:
        """Whether a weight depends on all trained tokens of a branch."""
        return self.mode.startswith("sequence_")

    def weights(
        self,
        target_logprobs: Float[Tensor, " F"],
        behaviour_logprobs: Float[Tensor, " F"],
        *,
        branch: Int[Tensor, " F"],
        num_branches: int,
    ) -> Float[Tensor, " F"]:
        """Return the weight of each entry, without a gradient.

        Args:
            target_logprobs: log-probs of the trained policy.
            behaviour_logprobs: log-probs of the distribution that the tokens were sampled from.
            branch: ascending branch numbers.
            num_branches: number of branches.

        Example: log-probs [-1, -1] of a branch whose tokens were sampled at [-1.5, -3] have the ratios 1.649 and 7.389
        and the product 12.18. With max_importance=2, token_truncate gives [1.649, 2], token_mask [1.649, 0],
        sequence_truncate [2, 2] and sequence_mask [0, 0].
        """
        log_ratio = (target_logprobs - behaviour_logprobs).detach()
        if self.is_of_sequences:
            log_ratio = branch_sums(log_ratio, branch, num_branches)[branch]
        ratio = torch.exp(log_ratio.clamp(-MAX_LOG_IMPORTANCE, MAX_LOG_IMPORTANCE))
        if self.mode.endswith("_truncate"):
            return ratio.clamp(max=self.max_importance)
        is_outside = (ratio < self.min_importance) | (ratio > self.max_importance)
        return ratio.masked_fill(is_outside, 0.0)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


KlEstimator = Literal["k1", "k2", "k3"]
"""With d = logp - reference logp: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d, which is never negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regularizers:
    """Coefficients of the KL penalty and the entropy bonus; None drops a part, 0 measures it without a gradient.

    Attributes:
        kl_coefficient: factor of the estimated KL(policy, reference), at least 0.
        kl_estimator: see `KlEstimator`.
        entropy_coefficient: factor of the entropy in nats, at least 0; the entropy is a bonus, so it is subtracted.
    """

    kl_coefficient: float | None = None
    kl_estimator: KlEstimator = "k3"
    entropy_coefficient: float | None = None

    def __post_init__(self) -> None:
        if self.kl_estimator not in get_args(KlEstimator):
            raise ConfigError(
                f"kl_estimator must be one of {', '.join(get_args(KlEstimator))}, got {self.kl_estimator!r}"
            )
        for name in ("kl_coefficient", "entropy_coefficient"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ConfigError(f"{name} must be a finite number of at least 0, got {value!r}; None leaves it out")


def estimate_kl(
    logprobs: Float[Tensor, " F"], ref_logprobs: Float[Tensor, " F"], *, estimator: KlEstimator
) -> Float[Tensor, " F"]:
    """Estimate KL(policy, reference) at each sampled token, differentiable in `logprobs`.

    k1 and k3 are unbiased estimates, k2 is not. As a loss on tokens sampled from the policy itself, k2 has on average
    the gradient of the KL, k3 nearly so close to the reference, and k1 has mean gradient 0.

    Example: logp -1.0 against -1.5 gives k1 = 0.5, k2 = 0.125 and k3 = 0.1065.
    """
    difference = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return torch.expm1(-bounded) + bounded


class PolicyOptions(TypedDict, total=False):
    """Keyword arguments of every policy objective; omitted or None, an argument changes nothing.

    Importance weights correct for an engine whose top-p, top-k or rounding makes its distribution differ from the
    trainer's: each term is multiplied by exp(logp_old - behaviour_logp), bounded and detached. logp_old is
    `old_logprobs`, the trainer's log-prob of the policy that sampled, or the current log-prob if `old_logprobs` is
    None. The KL penalty and the entropy bonus are added to the term of every trained token, with the normaliser's
    weights but without importance weights.

    Example: `grpo(advantages, masks, old, ref_logprobs=ref, kl_coefficient=0.04)` is GRPO with equation 4 of its paper.
    """

    behaviour_logprobs: BranchValues | None
    """K lists with one log-prob per token, of the distribution that was sampled from; needs `max_importance`."""
    max_importance: float | None
    """Cap of an importance weight, or upper bound of the mask; positive."""
    min_importance: float | None
    """Lower bound of the mask; default 0. Only for the two mask modes."""
    importance: ImportanceMode | None
    """Default "token_truncate"; see `ImportanceMode`. The two sequence modes are refused with shared="once"."""
    ref_logprobs: BranchValues | None
    """K lists with one log-prob per token, of a reference model; needs `kl_coefficient`."""
    kl_coefficient: float | None
    """Factor of the KL penalty, at least 0."""
    kl_estimator: KlEstimator | None
    """Default "k3"; see `KlEstimator`."""
    entropy_coefficient: float | None
    """Factor of the entropy bonus, at least 0; 0 measures the entropy only."""


_SIMILARITY = 0.5
_PER_TOKEN = frozenset({"old_logprobs", "behaviour_logprobs", "ref_logprobs"})
"""Values refused as one number per sequence, which could mean the sequence's sum or each token's value."""

_COMMON = ("advantages", "loss_masks", "old_logprobs", "clip", "normalizer", "shared", "divisor")


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
    """Build the objective of a policy loss with the shared options.

    Args:
        name: name of the objective.
        surrogate: the loss of each entry, without the shared options.
        options: see `PolicyOptions`.
        advantages: K numbers, or K lists with one number per token.
        loss_masks: K masks; required.
        old_logprobs: K lists, or None for the current policy's own log-probs.
        weighting: normaliser and sharing convention.
        scope: which entries the surrogate must see together.
        returns: returns, for a loss that reads values.
        old_values: values before the step, for a loss that reads values.
        arguments: names of arguments that only this loss has.

    Raises:
        InputError: masks or advantages are missing.
        ConfigError: an unknown option, an option without another that it needs, or an unsupported sharing convention.
    """
    if loss_masks is None:
        raise InputError(f"{name} needs loss_masks, which mark the tokens that the policy sampled")
    if advantages is None:
        raise InputError(f"{name} needs advantages: one number per sequence, or one per token")
    _check_names(name, options, own=(*_COMMON, *arguments))
    importance, regularizers = _importance_of(options), _regularizers_of(options)
    if importance is not None and importance.is_of_sequences:
        scope = "branch"
    if scope == "branch":
        refuse_once(name, weighting)
    needs: dict[Need, object] = {"entropy": regularizers.entropy_coefficient, "value": returns}

    def terms(entries: Entries) -> Terms:
        old = entries.values.get("old_logprobs", entries.logprobs.detach())
        found = surrogate(entries, old, entries.values["advantages"])
        plain = checked_terms(name, found, entries.logprobs, entries.logprobs.numel())
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
    """Refuse the convention `once` for losses whose terms depend on the whole sequence.

    Raises:
        ConfigError: shared="once".
    """
    if weighting.shared == "once":
        raise ConfigError(
            f'{name} supports only shared="sum", got shared="once"; its ratio covers a whole sequence, so a shared '
            "token has no term of its own to count once"
        )


def _check_names(objective: str, options: Mapping[str, Any], *, own: tuple[str, ...]) -> None:
    """Refuse options that no policy objective has.

    Args:
        objective: name of the objective.
        options: keyword arguments.
        own: names of the objective's own arguments, as candidates for a suggestion.

    Raises:
        ConfigError: an unknown name; suggests the nearest valid one.

    Example: for grpo with `kl_coeficient` the error asks "did you mean 'kl_coefficient'?".
    """
    for name in options:
        if name in PolicyOptions.__annotations__:
            continue
        known = [*own, *PolicyOptions.__annotations__]
        near = difflib.get_close_matches(name, known, n=1, cutoff=_SIMILARITY)
        hint = f"did you mean {near[0]!r}?" if near else f"choose {', '.join(known)}"
        raise ConfigError(f"{objective} has no option {name!r}; {hint}")


def _importance_of(options: PolicyOptions) -> Importance | None:
    """Return how terms are weighted; None if no importance option is given.

    Raises:
        ConfigError: an option without another that it needs, or an invalid bound.
    """
    lower, cap, mode = options.get("min_importance"), options.get("max_importance"), options.get("importance")
    missing = [name for name in ("behaviour_logprobs", "max_importance") if options.get(name) is None]
    if len(missing) == 2 and lower is None and mode is None:
        return None
    if missing:
        raise ConfigError(
            f"importance sampling needs behaviour_logprobs and max_importance, missing: {' and '.join(missing)}; "
            "set both, or none of behaviour_logprobs, max_importance, min_importance, importance"
        )
    assert cap is not None
    return Importance(
        max_importance=cap,
        min_importance=0.0 if lower is None else lower,
        mode="token_truncate" if mode is None else mode,
    )


def _regularizers_of(options: PolicyOptions) -> Regularizers:
    """Return the KL penalty and the entropy bonus.

    Raises:
        ConfigError: a KL option without another that it needs, or an invalid coefficient.
    """
    estimator = options.get("kl_estimator")
    missing = [name for name in ("ref_logprobs", "kl_coefficient") if options.get(name) is None]
    if missing and (len(missing) < 2 or estimator is not None):
        raise ConfigError(
            f"a KL penalty needs ref_logprobs and kl_coefficient, missing: {' and '.join(missing)}; set both, or "
            "none of ref_logprobs, kl_coefficient, kl_estimator"
        )
    return Regularizers(
        kl_coefficient=options.get("kl_coefficient"),
        kl_estimator="k3" if estimator is None else estimator,
        entropy_coefficient=options.get("entropy_coefficient"),
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
