"""GSPO: the clipped surrogate of the sequence ratio, the geometric mean of its tokens' ratios."""

from typing import Unpack

from torch import Tensor

from treering.train.branch_values import BranchValues
from treering.train.loss_weights import Normalizer, Shared, Weighting
from treering.train.objective import Entries, Objective, Terms
from treering.train.objectives.options import PolicyOptions
from treering.train.objectives.policy import PolicyLoss, clipped, make_objective, refuse_once
from treering.train.objectives.sequence_ratio import mean_log_ratio
from treering.train.objectives.surrogate import Clip, surrogate_of_ratio


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
    """Group sequence policy optimisation: -min(s A, clip(s, 1 - low, 1 + high) A) per sequence.

    `s = exp(mean of logp - old_logp over the sequence's trained tokens)` (arXiv 2507.18071, equations 5 to 7). It is
    computed in the paper's token form (GSPO-token, equations 13 and 14), s at every token with the gradient of that
    token's own log-prob. With one advantage per sequence both forms are equal, and the token form takes one advantage
    per token too. Without `old_logprobs` s = 1. Other arguments and errors as in `grpo`.

    Raises:
        ConfigError: as in `grpo`, and for shared="once".

    Example: a sequence with the log-ratios [0.0, 0.2] has s = exp(0.1) = 1.105; A = 2 gives -1.0004 * 2 = -2.0008.
    """
    weighting = Weighting(normalizer=normalizer, shared=shared, divisor=divisor)
    refuse_once("gspo", weighting)

    of_tokens = clipped(clip)

    def of_sequences(entries: Entries, old: Tensor, advantages: Tensor) -> Terms:
        return surrogate_of_ratio(mean_log_ratio(entries, old), advantages, clip=clip)

    policy = PolicyLoss(
        name="gspo",
        advantages=advantages,
        loss_masks=loss_masks,
        old_logprobs=old_logprobs,
        weighting=weighting,
        surrogate=of_tokens if old_logprobs is None else of_sequences,
        scope="entry" if old_logprobs is None else "branch",
    )
    return make_objective(policy, options)
