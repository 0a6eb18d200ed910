"""RLOO: a sequence is one action, and its ratio is the product of its tokens' ratios."""

from typing import Unpack

from jaxtyping import Float
from torch import Tensor

from treering.train.objective import BranchValues, Entries, Normalizer, Objective, Shared, Terms, Weighting, branch_sums
from treering.train.policy_loss import (
    Clip,
    PolicyOptions,
    check_clip,
    num_trained,
    own_log_ratio,
    policy_objective,
    surrogate_of_ratio,
)


def summed_log_ratio(entries: Entries, old_logprobs: Float[Tensor, " F"]) -> Float[Tensor, " F"]:
    """Return the sum of log r over each entry's branch, with gradient T (its trained tokens) in the entry's log-prob.

    Divided by T and summed over the tokens, a term of it has the value and gradient of the sequence.

    Example: log-ratios [0.1, 0.3] of a branch have the value 0.4 at both.
    """
    log_ratio = entries.logprobs - old_logprobs
    sums = branch_sums(log_ratio.detach(), entries.branch, entries.num_branches)
    return sums[entries.branch] + num_trained(entries) * own_log_ratio(entries)


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
    """Build the RLOO objective: -A times the log-prob of the sequence, averaged over sequences.

    See arXiv 2402.14740, section 3. Without `old_logprobs` the terms are -A logp, summed in a sequence, and `clip` is
    not used. With them the sequence is one action of ratio rho = exp(sum of logp - old_logp over its trained tokens),
    and its loss is -min(rho A, clip(rho, 1 - low, 1 + high) A), as in TRL's RLOOTrainer. The share of a token in the
    gradient is then rho A logp', so advantages may differ between tokens, and at rho = 1 both forms have the same
    gradient. For other arguments and errors, see `grpo`.

    Raises:
        ConfigError: see `grpo`; also shared="once" together with `old_logprobs`.

    Example: a sequence with logp [-1, -2] and A = 2 gives 2 * 3 = 6. With old log-probs [-1.1, -2.0], rho = exp(0.1) =
    1.105 gives -2.210.
    """
    check_clip(clip)

    def of_sequences(entries: Entries, old: Tensor, advantages: Tensor) -> Terms:
        whole = surrogate_of_ratio(summed_log_ratio(entries, old), advantages, clip=clip)
        return Terms(loss=whole.loss / num_trained(entries), metrics=whole.metrics)

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
