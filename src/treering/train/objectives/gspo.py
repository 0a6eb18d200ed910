"""GSPO: the clipped surrogate of a sequence's ratio, the geometric mean of its tokens' ratios."""

from typing import Unpack

from jaxtyping import Float
from torch import Tensor

from treering.train.objective import BranchValues, Entries, Normalizer, Objective, Shared, Terms, Weighting, branch_sums
from treering.train.policy_loss import (
    Clip,
    PolicyOptions,
    clipped,
    num_trained,
    own_log_ratio,
    policy_objective,
    refuse_once,
    surrogate_of_ratio,
)


def mean_log_ratio(entries: Entries, old_logprobs: Float[Tensor, " F"]) -> Float[Tensor, " F"]:
    """Return the mean of log r over each entry's branch, with a gradient of 1 in the entry's own log-prob only.

    Summed over the T tokens of a sequence with one advantage, the gradient is T times that of the mean; it stays
    correct if advantages differ between tokens.

    Example: log-ratios [0.1, 0.3] of a branch have the value 0.2 at both.
    """
    log_ratio = entries.logprobs - old_logprobs
    sums = branch_sums(log_ratio.detach(), entries.branch, entries.num_branches)
    return (sums[entries.branch] / num_trained(entries)) + own_log_ratio(entries)


def gspo(
    advantages: BranchValues,
    loss_masks: BranchValues,
    old_logprobs: BranchValues | None = None,
    clip: Clip = (3e-4, 4e-4),
    *,
    normalizer: Normalizer = "sequence_mean",
    shared: Shared = "sum",
    divisor: float | None = None,
    **options: Unpack[PolicyOptions],
) -> Objective:
    """Build the GSPO objective: -min(s A, clip(s, 1 - low, 1 + high) A) per sequence.

    `s = exp(mean of logp - old_logp over the sequence's trained tokens)` (arXiv 2507.18071, equations 5 to 7). It is
    computed in the paper's token form (GSPO-token, equations 13 and 14): s at every token, with the gradient of that
    token's own log-prob. With one advantage per sequence both forms are equal; the token form also takes one advantage
    per token. Without `old_logprobs`, s = 1. For other arguments and errors, see `grpo`.

    Raises:
        ConfigError: see `grpo`; also shared="once".

    Example: a sequence with the log-ratios [0.0, 0.2] has s = exp(0.1) = 1.105; A = 2 gives -1.0004 * 2 = -2.0008.
    """
    weighting = Weighting(normalizer=normalizer, shared=shared, divisor=divisor)
    refuse_once("gspo", weighting)

    of_tokens = clipped(clip)

    def of_sequences(entries: Entries, old: Tensor, advantages: Tensor) -> Terms:
        return surrogate_of_ratio(mean_log_ratio(entries, old), advantages, clip=clip)

    return policy_objective(
        "gspo",
        of_tokens if old_logprobs is None else of_sequences,
        options,
        advantages=advantages,
        loss_masks=loss_masks,
        old_logprobs=old_logprobs,
        weighting=weighting,
        scope="entry" if old_logprobs is None else "branch",
    )
