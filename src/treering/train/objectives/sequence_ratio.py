"""GSPO and RLOO: policy objectives whose ratio is that of a whole sequence."""

from typing import Unpack

from jaxtyping import Float
from torch import Tensor

from treering.train.branch_values import BranchValues
from treering.train.loss_weights import Normalizer, Shared, Weighting
from treering.train.objective import Entries, Objective, Terms, branch_sizes, branch_sums
from treering.train.objectives.options import PolicyOptions
from treering.train.objectives.policy import (
    Clip,
    check_clip,
    clipped,
    policy_objective,
    refuse_once,
    surrogate_of_ratio,
)


def mean_log_ratio(entries: Entries, old_logprobs: Float[Tensor, " F"]) -> Float[Tensor, " F"]:
    """The mean of log r over each entry's branch, with a gradient of 1 in the entry's own log-prob alone.

    Summed over the T tokens of a sequence with one advantage, that is T times the gradient of the mean; it stays
    correct if advantages differ from token to token.

    Example: log-ratios [0.1, 0.3] of a branch have the value 0.2 at both.
    """
    log_ratio = entries.logprobs - old_logprobs
    sums = branch_sums(log_ratio.detach(), entries.branch, entries.num_branches)
    return (sums[entries.branch] / num_tokens(entries)) + _own(entries)


def summed_log_ratio(entries: Entries, old_logprobs: Float[Tensor, " F"]) -> Float[Tensor, " F"]:
    """The sum of log r over each entry's branch, with gradient T (its trained tokens) in the entry's own log-prob.

    A term of it, divided by T and summed over the tokens, has the value and gradient of the sequence.

    Example: log-ratios [0.1, 0.3] of a branch have the value 0.4 at both.
    """
    log_ratio = entries.logprobs - old_logprobs
    sums = branch_sums(log_ratio.detach(), entries.branch, entries.num_branches)
    return sums[entries.branch] + num_tokens(entries) * _own(entries)


def num_tokens(entries: Entries) -> Float[Tensor, " F"]:
    """The number of trained entries of each entry's branch."""
    return branch_sizes(entries.branch, entries.num_branches, like=entries.logprobs)[entries.branch]


def _own(entries: Entries) -> Float[Tensor, " F"]:
    return entries.logprobs - entries.logprobs.detach()


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


def rloo(
    advantages: BranchValues,
    loss_masks: BranchValues,
    old_logprobs: BranchValues | None = None,
    clip: Clip = (0.2, 0.2),
    *,
    normalizer: Normalizer = "sequence_sum",
    shared: Shared = "sum",
    divisor: float | None = None,
    **options: Unpack[PolicyOptions],
) -> Objective:
    """REINFORCE leave-one-out: -A times the log-probability of the sequence, averaged over sequences.

    (arXiv 2402.14740, section 3.) Without `old_logprobs` the terms are -A logp, summed in a sequence, and `clip` is not
    used. With them the sequence is one action of ratio rho = exp(sum of logp - old_logp over its trained tokens), and
    its loss is -min(rho A, clip(rho, 1 - low, 1 + high) A), as in TRL's RLOOTrainer. A token's share of the gradient is
    then rho A logp', so advantages may differ from token to token, and at rho = 1 both forms have the same gradient.
    Other arguments and errors as in `grpo`.

    Raises:
        ConfigError: as in `grpo`, and for shared="once" together with `old_logprobs`.

    Example: a sequence with logp [-1, -2] and A = 2 gives 2 * 3 = 6. With old log-probs [-1.1, -2.0], rho = exp(0.1) =
    1.105 gives -2.210.
    """
    check_clip(clip)

    def of_sequences(entries: Entries, old: Tensor, advantages: Tensor) -> Terms:
        whole = surrogate_of_ratio(summed_log_ratio(entries, old), advantages, clip=clip)
        return Terms(loss=whole.loss / num_tokens(entries), metrics=whole.metrics)

    return policy_objective(
        "rloo",
        _reinforce if old_logprobs is None else of_sequences,
        options,
        advantages=advantages,
        loss_masks=loss_masks,
        old_logprobs=old_logprobs,
        weighting=Weighting(normalizer=normalizer, shared=shared, divisor=divisor),
        scope="entry" if old_logprobs is None else "branch",
    )


def _reinforce(entries: Entries, old: Tensor, advantages: Tensor) -> Terms:
    return Terms(loss=-advantages * entries.logprobs, metrics={})
