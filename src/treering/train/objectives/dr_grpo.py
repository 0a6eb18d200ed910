"""Dr. GRPO: GRPO's surrogate without division by the length of a sequence."""

from typing import Unpack

from treering.train.objective import BranchValues, Normalizer, Objective, Shared, Weighting
from treering.train.policy_loss import Clip, PolicyOptions, clipped, policy_objective


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
    """Build the Dr. GRPO objective: the clipped surrogate of `grpo` without division by the length of a sequence.

    The default normaliser is the paper's `sequence_sum`: terms are summed in a sequence and averaged over sequences
    (arXiv 2503.20783, section 3). With a `divisor` it is `constant`, as in the paper's code, which divides by the
    longest response that could be sampled. Its advantages are rewards minus the group's mean, not divided by the
    deviation. For other arguments and errors, see `grpo`.

    Example: sequences of 1 and 3 trained tokens whose terms are all -2 give (-2 - 6) / 2 = -4, and with divisor=100
    -8 / 100 = -0.08.
    """
    default: Normalizer = "sequence_sum" if divisor is None else "constant"
    return policy_objective(
        "dr_grpo",
        clipped(clip),
        options,
        advantages=advantages,
        loss_masks=loss_masks,
        old_logprobs=old_logprobs,
        weighting=Weighting(normalizer=default if normalizer is None else normalizer, shared=shared, divisor=divisor),
    )
