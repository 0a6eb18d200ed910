"""CISPO: the clipped ratio of each token as a constant weight of its log-prob."""

from typing import Unpack

from torch import Tensor

from treering.train.objective import BranchValues, Entries, Normalizer, Objective, Shared, Terms, Weighting
from treering.train.policy_loss import MAX_LOG_RATIO, Clip, PolicyOptions, check_clip, policy_objective, ratio_metrics


def cispo(
    advantages: BranchValues,
    loss_masks: BranchValues,
    old_logprobs: BranchValues | None = None,
    clip: Clip = (1.0, 4.0),
    *,
    normalizer: Normalizer = "token_mean",
    shared: Shared = "sum",
    divisor: float | None = None,
    **options: Unpack[PolicyOptions],
) -> Objective:
    """Build the CISPO objective: -clip(r, 1 - low, 1 + high) A logp per token, with the clipped ratio detached.

    `r = exp(logp - old_logp)` (arXiv 2506.13585, equations 4 and 5). As in the paper, there is no lower bound by
    default (low = 1), and the mean is over all tokens; the paper tunes the upper bound without giving it, and 1 + high
    = 5 is common. Without `old_logprobs` the weight is 1. For other arguments and errors, see `grpo`.

    Metrics: ratio, approx_kl; clip_low and clip_high, the share of tokens whose weight is clipped.

    Example: one trained token with logp -1.0, old -3.0 (r = 7.389) and A = 2 gives -5 * 2 * -1.0 = 10, and the gradient
    -10 with respect to logp.
    """
    check_clip(clip)
    low, high = clip

    def surrogate(entries: Entries, old: Tensor, advantages: Tensor) -> Terms:
        log_ratio = (entries.logprobs.detach() - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        metrics = {
            **ratio_metrics(log_ratio),
            "clip_low": (ratio < 1 - low).to(ratio.dtype),
            "clip_high": (ratio > 1 + high).to(ratio.dtype),
        }
        return Terms(loss=-ratio.clamp(1 - low, 1 + high) * advantages * entries.logprobs, metrics=metrics)

    return policy_objective(
        "cispo",
        surrogate,
        options,
        advantages=advantages,
        loss_masks=loss_masks,
        old_logprobs=old_logprobs,
        weighting=Weighting(normalizer=normalizer, shared=shared, divisor=divisor),
    )
