"""PPO: the clipped surrogate with the caller's advantages, plus an optional value loss."""

import math
from typing import Unpack

import torch
from torch import Tensor

from treering.errors import ConfigError
from treering.train.objective import BranchValues, Entries, Normalizer, Objective, Shared, Terms, Weighting
from treering.train.policy_loss import Clip, PolicyOptions, clipped, policy_objective

DEFAULT_COEFFICIENT = 0.5


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
    """Build the PPO objective: the clipped surrogate per token and, with `returns`, the loss of a value head.

    See arXiv 1707.06347, equations 7 and 9. The value loss of a trained token is value_coefficient * (v - R)^2 / 2,
    where v is the head's output at the state before the token. With `value_clip` it is the maximum of that and the same
    with v clipped to [old_value - value_clip, old_value + value_clip]. For other arguments and errors, see `grpo`.

    Args:
        advantages: see `grpo`; generalised advantage estimation gives one number per token.
        loss_masks: see `grpo`.
        old_logprobs: see `grpo`.
        clip: see `grpo`.
        returns: K numbers, or K lists with one number per token: the target of the value at the state before it. Needs
            a value head. None trains only the policy.
        value_coefficient: at least 0, 0.5 if None; needs `returns`.
        old_values: K lists with one value per token, computed by the head at sampling time; needs `value_clip`.
        value_clip: how far a value may move, positive; needs `old_values`.
        normalizer: normaliser of both losses; see `Weighting`.
        shared: see `Weighting`.
        divisor: for normalizer="constant".
        **options: see `PolicyOptions`.

    Raises:
        InputError: masks or advantages are missing.
        ConfigError: an invalid clip, option or combination.

    Example: one trained token with r = 1, A = 2, v = 1 and R = 3 gives -2 + 0.5 * 4 / 2 = -1.
    """
    rest = {"value_coefficient": value_coefficient, "old_values": old_values, "value_clip": value_clip}
    given = [option for option, value in rest.items() if value is not None]
    if returns is None and given:
        raise ConfigError(f"{' and '.join(given)} belong to a value loss, which needs returns; give returns too")
    if (old_values is None) != (value_clip is None):
        missing = "old_values" if old_values is None else "value_clip"
        raise ConfigError(f"a clipped value loss needs old_values and value_clip, and {missing} is missing; give both")
    if value_clip is not None and not (isinstance(value_clip, int | float) and 0 < value_clip < math.inf):
        raise ConfigError(f"value_clip must be a positive number, got {value_clip!r}; None does not bound values")
    coefficient = DEFAULT_COEFFICIENT if value_coefficient is None else value_coefficient
    if not isinstance(coefficient, int | float) or not 0 <= coefficient < math.inf:
        raise ConfigError(f"value_coefficient must be a finite number of at least 0, got {coefficient!r}")
    of_policy = clipped(clip)

    def surrogate(entries: Entries, old: Tensor, advantages: Tensor) -> Terms:
        plain = of_policy(entries, old, advantages)
        if entries.state_values is None:
            return plain
        value = entries.state_values
        error = (value - entries.values["returns"]).square()
        if value_clip is not None:
            old_value = entries.values["old_values"]
            bounded = old_value + (value - old_value).clamp(-value_clip, value_clip)
            error = torch.maximum(error, (bounded - entries.values["returns"]).square())
        loss = 0.5 * error
        metrics = {**plain.metrics, "value": value.detach(), "value_loss": loss.detach()}
        return Terms(loss=plain.loss + coefficient * loss, metrics=metrics)

    return policy_objective(
        "ppo",
        surrogate,
        options,
        advantages=advantages,
        loss_masks=loss_masks,
        old_logprobs=old_logprobs,
        weighting=Weighting(normalizer=normalizer, shared=shared, divisor=divisor),
        returns=returns,
        old_values=old_values,
        arguments=("returns", *rest),
    )
