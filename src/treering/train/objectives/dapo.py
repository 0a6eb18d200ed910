"""DAPO: GRPO's surrogate with a higher upper clip, averaged over all tokens."""

from typing import Unpack

from treering.train.objective import BranchValues, Normalizer, Objective, Shared, Weighting
from treering.train.policy_loss import Clip, PolicyOptions, clipped, policy_objective


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
    """Build the DAPO objective: the clipped surrogate of `grpo` with a higher upper clip and the mean over all tokens.

    See arXiv 2503.14476, sections 3.1 and 3.3; for arguments and errors, `grpo`.

    Example: one trained token with logp -1.0, old -1.5 (r = 1.649) and A = 2 gives -min(3.297, 1.28 * 2) = -2.56.
    """
    return policy_objective(
        "dapo",
        clipped(clip),
        options,
        advantages=advantages,
        loss_masks=loss_masks,
        old_logprobs=old_logprobs,
        weighting=Weighting(normalizer=normalizer, shared=shared, divisor=divisor),
    )
