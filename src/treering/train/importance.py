"""Truncated importance sampling: weights for tokens that another distribution sampled than the one that is trained.

Knows two log-probabilities per entry and a cap. Knows nothing of losses.

    F flat entries
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from treering.errors import ConfigError
from treering.train.branch_values import BranchValues

MAX_LOG_IMPORTANCE = 20.0
"""Log-weights are clamped here, as in verl: 5e8 is beyond any cap in use, and finite in every float format."""


def importance_weights(
    logprobs: Float[Tensor, " F"], behaviour_logprobs: Float[Tensor, " F"], *, max_importance: float
) -> Float[Tensor, " F"]:
    """min(exp(logprobs - behaviour_logprobs), max_importance) per entry, without a gradient.

    Example: log-probs [-1, -1] of tokens sampled at [-1.5, -3] with max_importance=2 have the weights [1.649, 2].
    """
    log_weights = (logprobs.detach() - behaviour_logprobs).clamp(-MAX_LOG_IMPORTANCE, MAX_LOG_IMPORTANCE)
    return torch.exp(log_weights).clamp(max=max_importance)


def check_importance(behaviour_logprobs: BranchValues | None, max_importance: float | None) -> None:
    """Raises ConfigError where one is given without the other, or where the cap is no positive number."""
    if (behaviour_logprobs is None) != (max_importance is None):
        missing = "behaviour_logprobs" if behaviour_logprobs is None else "max_importance"
        raise ConfigError(
            f"importance sampling needs behaviour_logprobs and max_importance, got no {missing}; give both or neither"
        )
    if max_importance is None:
        return
    if not isinstance(max_importance, int | float) or math.isnan(max_importance) or max_importance <= 0:
        raise ConfigError(f"max_importance is a positive number, got {max_importance!r}; 2.0 is common")
