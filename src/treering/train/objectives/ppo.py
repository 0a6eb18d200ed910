"""PPO: the clipped surrogate with the caller's advantages, plus an optional value loss."""

from typing import Unpack

from torch import Tensor

from treering.train.branch_values import BranchValues
from treering.train.loss_weights import Normalizer, Shared, Weighting
from treering.train.objective import Entries, Objective, Terms
from treering.train.objectives.options import PolicyOptions
from treering.train.objectives.policy import PolicyLoss, clipped, make_objective
from treering.train.objectives.surrogate import Clip
from treering.train.objectives.value_loss import ValueLoss, make_value_loss


def ppo(
    advantages: BranchValues,
    loss_masks: BranchValues,
    old_logprobs: BranchValues | None = None,
    clip: Clip = (0.2, 0.2),
    *,
    returns: BranchValues | None = None,
    value_coefficient: float | None = None,
    old_values: BranchValues | None = None,
    value_clip: float | None = None,
    normalizer: Normalizer = "token_mean",
    shared: Shared = "sum",
    divisor: float | None = None,
    **options: Unpack[PolicyOptions],
) -> Objective:
    """Proximal policy optimisation: the clipped surrogate per token and, with `returns`, the loss of a value head.

    (arXiv 1707.06347, equations 7 and 9.) The value loss of a trained token is value_coefficient * (v - R)^2 / 2, where
    v is the head's output at the state before the token. With `value_clip` it is the maximum of that and the same with
    v clipped to [old_value - value_clip, old_value + value_clip]. Other arguments and errors as in `grpo`.

    Args:
        advantages: as in `grpo`; generalised advantage estimation gives one number per token.
        loss_masks: as in `grpo`.
        old_logprobs: as in `grpo`.
        clip: as in `grpo`.
        returns: K numbers, or K lists with one number per token: the target of the value of the state before it. Needs
            a value head. None trains the policy only.
        value_coefficient: 0.5 if None; needs `returns`.
        old_values: K lists with one value per token, of the head when it sampled; needs `value_clip`.
        value_clip: how far a value may move, positive; needs `old_values`.
        normalizer: see `Weighting`; of both losses.
        shared: see `Weighting`.
        divisor: for normalizer="constant".
        **options: see `PolicyOptions`.

    Raises:
        InputError: no masks.
        ConfigError: an invalid clip, option or combination.

    Example: one trained token with r = 1, A = 2, v = 1 and R = 3 gives -2 + 0.5 * 4 / 2 = -1.
    """
    value_loss = make_value_loss(returns=returns, coefficient=value_coefficient, old_values=old_values, clip=value_clip)
    of_policy = clipped(clip)

    def surrogate(entries: Entries, old: Tensor, advantages: Tensor) -> Terms:
        policy_terms = of_policy(entries, old, advantages)
        return policy_terms if value_loss is None else _with_values(policy_terms, value_loss, entries)

    policy = PolicyLoss(
        name="ppo",
        advantages=advantages,
        loss_masks=loss_masks,
        old_logprobs=old_logprobs,
        weighting=Weighting(normalizer=normalizer, shared=shared, divisor=divisor),
        surrogate=surrogate,
        values={"returns": returns, "old_values": old_values},
        needs=frozenset() if value_loss is None else frozenset({"value"}),
        arguments=("returns", "value_coefficient", "old_values", "value_clip"),
    )
    return make_objective(policy, options)


def _with_values(policy_terms: Terms, value_loss: ValueLoss, entries: Entries) -> Terms:
    assert entries.state_values is not None
    given = entries.values
    loss = value_loss.of(entries.state_values, returns=given["returns"], old_values=given.get("old_values"))
    metrics = {**policy_terms.metrics, "value": entries.state_values.detach(), "value_loss": loss.detach()}
    return Terms(loss=policy_terms.loss + value_loss.coefficient * loss, metrics=metrics)
