"""GRPO, its relatives and CISPO: policy objectives with a ratio of each token."""

from typing import Unpack

from torch import Tensor

from treering.train.branch_values import BranchValues
from treering.train.loss_weights import Normalizer, Shared, Weighting
from treering.train.objective import Entries, Objective, Terms
from treering.train.objectives.options import PolicyOptions
from treering.train.objectives.policy import Clip, check_clip, clipped, policy_objective, ratio_metrics
from treering.train.objectives.regularizers import MAX_LOG_RATIO


def grpo(
    advantages: BranchValues,
    loss_masks: BranchValues,
    old_logprobs: BranchValues | None = None,
    clip: Clip = (0.2, 0.2),
    *,
    normalizer: Normalizer = "sequence_mean",
    shared: Shared = "sum",
    divisor: float | None = None,
    **options: Unpack[PolicyOptions],
) -> Objective:
    """Group relative policy optimisation: the clipped surrogate -min(r A, clip(r, 1 - low, 1 + high) A) per token.

    `r = exp(logp - old_logp)`. The default normaliser is the paper's: the mean inside a sequence, then over sequences
    (arXiv 2402.03300, equation 3; its KL term is `ref_logprobs` and `kl_coefficient`).

    Args:
        advantages: K numbers, or K lists with one number per token.
        loss_masks: K masks with one 0/1 entry per token (a sequence's first entry is ignored); required.
        old_logprobs: K lists with one log-probability per token, of the policy that sampled; None takes the current
            policy's own (r = 1, so nothing is clipped).
        clip: (low, high), both >= 0; a larger high is clip-higher.
        normalizer: see `Weighting`.
        shared: see `Weighting`.
        divisor: for normalizer="constant".
        **options: importance sampling, KL penalty, entropy bonus; see `PolicyOptions`.

    Raises:
        InputError: no masks.
        ConfigError: an invalid clip, option or combination.

    Example: one trained token with logp -1.0, old -1.5 (r = 1.649) and A = 2 gives -min(3.297, 1.2 * 2) = -2.4.
    """
    weighting = Weighting(normalizer=normalizer, shared=shared, divisor=divisor)
    return _of_tokens("grpo", advantages, loss_masks, old_logprobs, clip, weighting, options)


def dapo(
    advantages: BranchValues,
    loss_masks: BranchValues,
    old_logprobs: BranchValues | None = None,
    clip: Clip = (0.2, 0.28),
    *,
    normalizer: Normalizer = "token_mean",
    shared: Shared = "sum",
    divisor: float | None = None,
    **options: Unpack[PolicyOptions],
) -> Objective:
    """DAPO's loss: the clipped surrogate of `grpo` with a higher upper clip and the mean over all tokens.

    (arXiv 2503.14476, sections 3.1 and 3.3.) Arguments and errors as in `grpo`.

    Example: one trained token with logp -1.0, old -1.5 (r = 1.649) and A = 2 gives -min(3.297, 1.28 * 2) = -2.56.
    """
    weighting = Weighting(normalizer=normalizer, shared=shared, divisor=divisor)
    return _of_tokens("dapo", advantages, loss_masks, old_logprobs, clip, weighting, options)


def dr_grpo(
    advantages: BranchValues,
    loss_masks: BranchValues,
    old_logprobs: BranchValues | None = None,
    clip: Clip = (0.2, 0.2),
    *,
    normalizer: Normalizer | None = None,
    shared: Shared = "sum",
    divisor: float | None = None,
    **options: Unpack[PolicyOptions],
) -> Objective:
    """Dr. GRPO's loss: the clipped surrogate of `grpo`, in which no sequence is divided by its own length.

    The default normaliser is the paper's `sequence_sum`, terms summed in a sequence and averaged over sequences (arXiv
    2503.20783, section 3). With a `divisor` it is `constant`, as in the paper's code, which divides by the longest
    response that could be sampled. Its advantages are rewards less the group's mean, undivided by the deviation. Other
    arguments and errors as in `grpo`.

    Example: sequences of 1 and 3 trained tokens whose terms are all -2 give (-2 - 6) / 2 = -4, and with divisor=100
    -8 / 100 = -0.08.
    """
    default: Normalizer = "sequence_sum" if divisor is None else "constant"
    weighting = Weighting(normalizer=default if normalizer is None else normalizer, shared=shared, divisor=divisor)
    return _of_tokens("dr_grpo", advantages, loss_masks, old_logprobs, clip, weighting, options)


def _of_tokens(
    name: str,
    advantages: BranchValues,
    loss_masks: BranchValues,
    old_logprobs: BranchValues | None,
    clip: Clip,
    weighting: Weighting,
    options: PolicyOptions,
) -> Objective:
    return policy_objective(
        name,
        clipped(clip),
        options,
        advantages=advantages,
        loss_masks=loss_masks,
        old_logprobs=old_logprobs,
        weighting=weighting,
    )


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
    """CISPO: -clip(r, 1 - low, 1 + high) A logp per token, with the clipped ratio detached.

    `r = exp(logp - old_logp)` (arXiv 2506.13585, equations 4 and 5). As in the paper there is no lower bound by default
    (low = 1), and the mean is over all tokens; the paper tunes the upper bound without naming it, and 1 + high = 5 is
    common. Without `old_logprobs` the weight is 1. Other arguments and errors as in `grpo`.

    Metrics: ratio, approx_kl; clip_low and clip_high, the share of tokens whose weight is bounded.

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
