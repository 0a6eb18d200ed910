"""PPO: the clipped surrogate with the caller's advantages, plus an optional value loss."""

import math
from dataclasses import dataclass
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from treering.errors import ConfigError
from treering.train.branch_values import BranchValues
from treering.train.loss_weights import Normalizer, Shared, Weighting
from treering.train.objective import Entries, Objective, Terms
from treering.train.objectives.options import PolicyOptions
from treering.train.objectives.policy import Clip, PolicyLoss, clipped, make_objective

DEFAULT_COEFFICIENT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """A value loss and its weight relative to the policy loss.

    Attributes:
        coefficient: factor of the loss, at least 0.
        clip: how far a value may move from its earlier one; None for no bound.
    """

    coefficient: float = DEFAULT_COEFFICIENT
    clip: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.coefficient, int | float) or not 0 <= self.coefficient < math.inf:
            raise ConfigError(f"value_coefficient is a finite number of at least 0, got {self.coefficient!r}")
        if self.clip is not None and not (isinstance(self.clip, int | float) and 0 < self.clip < math.inf):
            raise ConfigError(f"value_clip is a positive number, got {self.clip!r}; None does not bound values")

    def of(
        self,
        values: Float[Tensor, " F"],
        *,
        returns: Float[Tensor, " F"],
        old_values: Float[Tensor, " F"] | None,
    ) -> Float[Tensor, " F"]:
        """Half the squared error, or the larger of both if values are clipped; differentiable, without the coefficient.

        Example: the value 2.0 with the return 3.0 gives 0.5; with the old value 1.0 and clip=0.5 it gives
        max(1, (1.5 - 3)^2) / 2 = 1.125.
        """
        error = (values - returns).square()
        if self.clip is None:
            return 0.5 * error
        assert old_values is not None
        bounded = old_values + (values - old_values).clamp(-self.clip, self.clip)
        return 0.5 * torch.maximum(error, (bounded - returns).square())


def make_value_loss(
    *,
    returns: BranchValues | None,
    coefficient: float | None,
    old_values: BranchValues | None,
    clip: float | None,
) -> ValueLoss | None:
    """A `ValueLoss` from the options; None without returns.

    Raises:
        ConfigError: an option without the others that it needs.
    """
    rest = {"value_coefficient": coefficient, "old_values": old_values, "value_clip": clip}
    given = [name for name, option in rest.items() if option is not None]
    if returns is None and given:
        raise ConfigError(f"{' and '.join(given)} belong to a value loss, which needs returns; give returns too")
    if (old_values is None) != (clip is None):
        missing = "old_values" if old_values is None else "value_clip"
        raise ConfigError(f"a clipped value loss needs old_values and value_clip, got no {missing}; give both")
    if returns is None:
        return None
    return ValueLoss(coefficient=DEFAULT_COEFFICIENT if coefficient is None else coefficient, clip=clip)


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
