"""RLOO: REINFORCE of whole sequences; the leave-one-out baseline is already in the advantages."""

from typing import Unpack

from torch import Tensor

from treering.train.branch_values import BranchValues
from treering.train.loss_weights import Normalizer, Shared, Weighting
from treering.train.objective import Entries, Objective, Terms
from treering.train.objectives.options import PolicyOptions
from treering.train.objectives.policy import PolicyLoss, make_objective
from treering.train.objectives.sequence_ratio import num_tokens, summed_log_ratio
from treering.train.objectives.surrogate import Clip, check_clip, surrogate_of_ratio


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

    policy = PolicyLoss(
        name="rloo",
        advantages=advantages,
        loss_masks=loss_masks,
        old_logprobs=old_logprobs,
        weighting=Weighting(normalizer=normalizer, shared=shared, divisor=divisor),
        surrogate=_reinforce if old_logprobs is None else of_sequences,
        scope="entry" if old_logprobs is None else "branch",
    )
    return make_objective(policy, options)


def _reinforce(entries: Entries, old: Tensor, advantages: Tensor) -> Terms:
    return Terms(loss=-advantages * entries.logprobs, metrics={})
