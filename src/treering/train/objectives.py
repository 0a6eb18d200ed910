"""Objectives: losses written for flat sequences, evaluated on branch views of a forest.

An objective holds per-branch data (masks, advantages, old log-probs) and one pure function from per-entry log-probs to
per-entry terms. It knows nothing of forests, models or micro-batches; denominators live in `weights`.

    K branches, numbered through all forests in order   F flat entries: tokens of branches, branches one after another
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from treering.errors import ConfigError, InputError
from treering.train.branch_values import BranchValues, as_masks, flatten
from treering.train.importance import check_importance, importance_weights
from treering.train.weights import Normalizer, Shared, Weighting

Clip = tuple[float, float]

MAX_LOG_RATIO = 60.0
"""Log-ratios are clamped here, where the ratio (1e26) is still finite in float32: an infinite one would make gradients
NaN even where the clip cuts them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entries:
    """What a term function sees: the trained entries of some branches, one after another, all [F].

    Attributes:
        logprobs: the policy's log-probabilities; differentiable.
        values: the objective's own per-entry data by name.
    """

    logprobs: Float[Tensor, " F"]
    values: Mapping[str, Float[Tensor, " F"]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """Per-entry results: `loss` [F] enters the weighted sum, `metrics` [F] are averaged over trained entries."""

    loss: Float[Tensor, " F"]
    metrics: Mapping[str, Float[Tensor, " F"]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Objective:
    """A loss over branches; made by the functions of this module.

    Attributes:
        name: as users call it.
        weighting: normaliser and sharing convention.
        loss_masks: K masks, or None to train every token but the first of each branch.
        values: per-branch data by name: K entries, each one number or one value per token.
        terms: the per-entry loss.
    """

    name: str
    weighting: Weighting
    terms: Callable[[Entries], Terms]
    loss_masks: BranchValues | None = None
    values: Mapping[str, BranchValues] = field(default_factory=dict)

    def masks(self, branch_length: NDArray[np.int64]) -> list[NDArray[np.bool_]]:
        """The K loss masks as booleans, checked against the branches' lengths.

        Raises:
            InputError: a mask too many or too few, of another length, or with entries other than 0 and 1.
        """
        if self.loss_masks is None:
            return [np.ones(length, bool) for length in branch_length]
        return as_masks(self.loss_masks, branch_length)

    def flat_values(
        self, branch_length: NDArray[np.int64], *, trained: NDArray[np.bool_]
    ) -> dict[str, NDArray[np.float64]]:
        """The per-branch data spread to entries: float64 [F] by name.

        Args:
            branch_length: int64 [K].
            trained: bool [F]; elsewhere values may be anything, NaN included, as hosts leave them.

        Raises:
            InputError: a list or an item of the wrong length, or a trained value that is not finite.
        """
        return {name: flatten(name, items, branch_length, trained=trained) for name, items in self.values.items()}


def sft(
    loss_masks: BranchValues | None = None,
    normalizer: Normalizer = "token_mean",
    shared: Shared = "sum",
    *,
    divisor: float | None = None,
) -> Objective:
    """Supervised fine-tuning: the negative log-probability of each trained token.

    Args:
        loss_masks: K masks with one 0/1 entry per token (a sequence's first entry is ignored); None trains all tokens.
        normalizer: token_mean, sequence_mean, tree_mean, constant (with `divisor`) or sum; see `Weighting`.
        shared: "sum" equals training every branch separately, "once" counts shared tokens once.
        divisor: of the constant normaliser.

    Example: branches [5, 6] and [5, 7] with log-probs -1 and -3 at their second tokens give the loss
    (1 + 3) / 2 = 2.0.
    """
    weighting = Weighting(normalizer=normalizer, shared=shared, divisor=divisor)
    return Objective(name="sft", weighting=weighting, terms=_sft_terms, loss_masks=loss_masks)


def grpo(
    advantages: BranchValues,
    loss_masks: BranchValues,
    old_logprobs: BranchValues | None = None,
    clip: Clip = (0.2, 0.2),
    *,
    behaviour_logprobs: BranchValues | None = None,
    max_importance: float | None = None,
    normalizer: Normalizer = "sequence_mean",
    shared: Shared = "sum",
    divisor: float | None = None,
) -> Objective:
    """Group relative policy optimisation: the clipped surrogate -min(r A, clip(r, 1 - low, 1 + high) A) per token.

    `r = exp(logp - old_logp)`. The default normaliser is the paper's: the mean inside a sequence, then over sequences
    (arXiv 2402.03300, equation 3, without its KL term).

    Args:
        advantages: K numbers, or K lists with one number per token.
        loss_masks: K masks with one 0/1 entry per token (a sequence's first entry is ignored); required.
        old_logprobs: K lists with one log-probability per token, of the policy that sampled; None takes the current
            policy's own (r = 1, so nothing is clipped).
        clip: (low, high), both >= 0.
        behaviour_logprobs: K lists with one log-probability per token, of the distribution that was sampled, where an
            engine's top-p, top-k or rounding made it another than the trainer's; None trusts that it was the same.
        max_importance: with them, each term is weighted by min(exp(logp_old - behaviour_logp), max_importance), held
            constant: truncated importance sampling per token (TRL's `token_truncate`, verl's token-level
            `rollout_is`). logp_old is `old_logprobs`, the trainer's own log-prob of the policy that sampled, or the
            current log-prob where these are None.
        normalizer: see `Weighting`.
        shared: see `Weighting`.
        divisor: of the constant normaliser.

    Example: one trained token with logp -1.0, old -1.5 (r = 1.649) and A = 2 gives -min(3.297, 1.2 * 2) = -2.4.
    """
    return _policy_objective(
        "grpo",
        advantages,
        loss_masks,
        old_logprobs,
        clip,
        (behaviour_logprobs, max_importance),
        Weighting(normalizer=normalizer, shared=shared, divisor=divisor),
    )


def dapo(
    advantages: BranchValues,
    loss_masks: BranchValues,
    old_logprobs: BranchValues | None = None,
    clip: Clip = (0.2, 0.28),
    *,
    behaviour_logprobs: BranchValues | None = None,
    max_importance: float | None = None,
    normalizer: Normalizer = "token_mean",
    shared: Shared = "sum",
    divisor: float | None = None,
) -> Objective:
    """DAPO's loss: the clipped surrogate of `grpo` with a higher upper clip and the mean over all tokens.

    (arXiv 2503.14476, sections 3.1 and 3.3.) Arguments as in `grpo`.

    Example: one trained token with logp -1.0, old -1.5 (r = 1.649) and A = 2 gives -min(3.297, 1.28 * 2) = -2.56.
    """
    return _policy_objective(
        "dapo",
        advantages,
        loss_masks,
        old_logprobs,
        clip,
        (behaviour_logprobs, max_importance),
        Weighting(normalizer=normalizer, shared=shared, divisor=divisor),
    )


def _policy_objective(
    name: str,
    advantages: BranchValues,
    loss_masks: BranchValues,
    old_logprobs: BranchValues | None,
    clip: Clip,
    importance: tuple[BranchValues | None, float | None],
    weighting: Weighting,
) -> Objective:
    if loss_masks is None:
        raise InputError(f"{name} needs loss_masks: which tokens did the policy sample?")
    _check_clip(clip)
    behaviour_logprobs, max_importance = importance
    check_importance(behaviour_logprobs, max_importance)
    named = {"advantages": advantages, "old_logprobs": old_logprobs, "behaviour_logprobs": behaviour_logprobs}
    values = {key: items for key, items in named.items() if items is not None}

    def terms(entries: Entries) -> Terms:
        old = entries.values.get("old_logprobs", entries.logprobs.detach())
        unweighted = clipped_surrogate(entries.logprobs, old, entries.values["advantages"], clip=clip)
        if max_importance is None:
            return unweighted
        weights = importance_weights(old, entries.values["behaviour_logprobs"], max_importance=max_importance)
        return Terms(loss=weights * unweighted.loss, metrics={**unweighted.metrics, "importance": weights})

    return Objective(name=name, weighting=weighting, terms=terms, loss_masks=loss_masks, values=values)


def clipped_surrogate(
    logprobs: Float[Tensor, " F"], old_logprobs: Float[Tensor, " F"], advantages: Float[Tensor, " F"], *, clip: Clip
) -> Terms:
    """PPO's clipped surrogate per entry, negated (arXiv 1707.06347, equation 7), with its usual metrics.

    Metrics: ratio; approx_kl = r - 1 - log r, which estimates KL(old, new); clip_low and clip_high, the share of
    entries whose gradient the lower or upper clip cuts.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    low, high = clip
    clipped = ratio.clamp(1 - low, 1 + high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    with torch.no_grad():
        metrics = {
            "ratio": ratio.detach(),
            "approx_kl": ratio.detach() - 1 - log_ratio.detach(),
            "clip_low": ((ratio < 1 - low) & (advantages < 0)).to(ratio.dtype),
            "clip_high": ((ratio > 1 + high) & (advantages > 0)).to(ratio.dtype),
        }
    return Terms(loss=loss, metrics=metrics)


def _sft_terms(entries: Entries) -> Terms:
    return Terms(loss=-entries.logprobs, metrics={})


def _check_clip(clip: Clip) -> None:
    is_pair = isinstance(clip, tuple | list) and len(clip) == 2 and all(isinstance(x, int | float) for x in clip)
    if not is_pair or not (0 <= clip[0] <= 1 and 0 <= clip[1] < float("inf")):
        raise ConfigError(f"clip must be (low, high) with 0 <= low <= 1 and high >= 0, got {clip!r}")
