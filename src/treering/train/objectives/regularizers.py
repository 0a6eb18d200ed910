"""A KL penalty towards a reference policy and an entropy bonus, per entry.

F flat entries
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from treering.errors import ConfigError

KlEstimator = Literal["k1", "k2", "k3"]
"""With d = logp - reference logp: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d, which is never negative."""

MAX_LOG_RATIO = 60.0
"""Log-ratios are clamped to this, where the ratio (1e26) is still finite in float32: an infinite ratio would make
gradients NaN even where the clip removes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regularizers:
    """The coefficients of both; None omits a part, 0 measures it without a gradient.

    Attributes:
        kl_coefficient: factor of the estimated KL(policy, reference), at least 0.
        kl_estimator: see `KlEstimator`.
        entropy_coefficient: factor of the entropy in nats, at least 0; a bonus, so it is subtracted.
    """

    kl_coefficient: float | None = None
    kl_estimator: KlEstimator = "k3"
    entropy_coefficient: float | None = None

    def __post_init__(self) -> None:
        if self.kl_estimator not in get_args(KlEstimator):
            raise ConfigError(f"kl_estimator is one of {', '.join(get_args(KlEstimator))}, got {self.kl_estimator!r}")
        for name in ("kl_coefficient", "entropy_coefficient"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ConfigError(f"{name} is a finite number of at least 0, got {value!r}; None leaves it out")


def estimate_kl(
    logprobs: Float[Tensor, " F"], ref_logprobs: Float[Tensor, " F"], *, estimator: KlEstimator
) -> Float[Tensor, " F"]:
    """KL(policy, reference) estimated at each sampled token, differentiable in `logprobs`.

    k1 and k3 are unbiased estimates, k2 is not. As a loss on tokens that the policy itself samples, k2 has on average
    the gradient of the KL, k3 nearly so close to the reference, and k1 has mean gradient 0.

    Example: logp -1.0 against -1.5 gives k1 = 0.5, k2 = 0.125 and k3 = 0.1065.
    """
    difference = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return torch.expm1(-bounded) + bounded
