"""GRPO, DAPO and Dr. GRPO: one clipped surrogate per token, three denominators."""

from typing import Unpack

from treering.train.branch_values import BranchValues
from treering.train.loss_weights import Normalizer, Shared, Weighting
from treering.train.objective import Objective
from treering.train.objectives.options import PolicyOptions
from treering.train.objectives.policy import PolicyLoss, clipped, make_objective
from treering.train.objectives.surrogate import Clip


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
    policy = PolicyLoss(
        name=name,
        advantages=advantages,
        loss_masks=loss_masks,
        old_logprobs=old_logprobs,
        weighting=weighting,
        surrogate=clipped(clip),
    )
    return make_objective(policy, options)
