"""GRPO: the clipped surrogate of each token's ratio, averaged in a sequence and then over sequences."""

from typing import Unpack

from treering.train.objective import BranchValues, Normalizer, Objective, Shared, Weighting
from treering.train.policy_loss import Clip, PolicyOptions, clipped, policy_objective


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
    """Build the GRPO objective: the clipped surrogate -min(r A, clip(r, 1 - low, 1 + high) A) per token.

    `r = exp(logp - old_logp)`. The default normaliser is the paper's: the mean inside a sequence, then over sequences
    (arXiv 2402.03300, equation 3). For the paper's KL term, set `ref_logprobs` and `kl_coefficient`.

    Args:
        advantages: K numbers, or K lists with one number per token.
        loss_masks: K masks with one 0/1 entry per token (a sequence's first entry is ignored); required.
        old_logprobs: K lists with one log-prob per token, of the policy that sampled; None uses the current policy's
            own log-probs (r = 1, so nothing is clipped).
        clip: (low, high), both >= 0; a larger high is clip-higher.
        normalizer: see `Weighting`.
        shared: see `Weighting`.
        divisor: for normalizer="constant".
        **options: importance sampling, KL penalty, entropy bonus; see `PolicyOptions`.

    Raises:
        InputError: masks or advantages are missing.
        ConfigError: an invalid clip, option or combination.

    Example: one trained token with logp -1.0, old -1.5 (r = 1.649) and A = 2 gives -min(3.297, 1.2 * 2) = -2.4.
    """
    return policy_objective(
        "grpo",
        clipped(clip),
        options,
        advantages=advantages,
        loss_masks=loss_masks,
        old_logprobs=old_logprobs,
        weighting=Weighting(normalizer=normalizer, shared=shared, divisor=divisor),
    )
