"""The squared error of a value head, clipped around its earlier values.

F flat entries
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from treering.errors import ConfigError
from treering.train.branch_values import BranchValues

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
