"""Group advantages: how much better each rollout is than the others of its prompt. Pure functions of rewards."""

import math
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from treering.errors import ConfigError, InputError

Estimator = Literal["grpo", "dr_grpo", "rloo"]
"""grpo: (r - mean) / (std + 1e-6) (arXiv 2402.03300). dr_grpo: r - mean (arXiv 2503.20783). rloo: r - mean of
the others (arXiv 2402.14740)."""

EPSILON = 1e-6
"""Added to the standard deviation; verl's value (TRL adds 1e-4)."""


def group_advantages(rewards: NDArray[np.float64], estimator: Estimator) -> NDArray[np.float64]:
    """The advantages of one group, in its order.

    The standard deviation is the sample's, with G - 1 in the denominator, as in TRL and verl. Groups with equal rewards
    or a single rollout have advantages of exactly 0.

    Args:
        rewards: float64 [G], finite.
        estimator: see `Estimator`.

    Returns:
        float64 [G].

    Raises:
        ConfigError: an unknown estimator.
        InputError: rewards that are not a flat list of finite numbers, or whose differences float64 cannot hold.

    Example: rewards [1, 0, 0, 0] have the mean 0.25 and the standard deviation 0.5: grpo gives [1.5, -0.5, -0.5, -0.5],
    dr_grpo [0.75, -0.25, -0.25, -0.25] and rloo [1, -1/3, -1/3, -1/3].
    """
    if estimator not in get_args(Estimator):
        raise ConfigError(f"an estimator is one of {', '.join(get_args(Estimator))}, got {estimator!r}; choose one")
    if rewards.ndim != 1 or not np.isfinite(rewards).all():
        raise InputError(f"rewards are a flat list of finite numbers, got {rewards}; leave such rollouts out")
    # Do not test the deviation: the mean of equal numbers may be rounded, which makes the deviation tiny but not 0.
    if (rewards == rewards[:1]).all():
        return np.zeros(rewards.size)
    values, exponent = scaled(rewards)
    centred: NDArray[np.float64] = values - values.mean()
    if estimator == "grpo":
        centred /= values.std(ddof=1) + math.ldexp(EPSILON, -exponent)
        return centred
    if estimator == "rloo":
        # r - (sum - r) / (G - 1) = (r - mean) * G / (G - 1)
        centred *= rewards.size / (rewards.size - 1)
    return unscaled(centred, exponent)


def scaled(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """Divides numbers above 1 by a power of two, which rounds nothing, so that their sums and squares are finite.

    Returns:
        The numbers, at most 1 in size, and the exponent e of their factor 2^-e; 0 if they are no larger.

    Example: [3, -8] gives [0.1875, -0.5] and 4; [0.5, 0.25] stays, with 0.
    """
    exponent = max(0, int(np.frexp(np.abs(values).max(initial=0.0))[1]))
    return np.ldexp(values, -exponent), exponent


def unscaled(values: NDArray[np.float64], exponent: int) -> NDArray[np.float64]:
    """The inverse of `scaled`.

    Raises:
        InputError: a number is too large for float64.
    """
    with np.errstate(over="ignore"):
        restored: NDArray[np.float64] = np.ldexp(values, exponent)
    if not np.isfinite(restored).all():
        raise InputError(
            f"rewards of a group differ by numbers that float64 can hold, got differences up to 2^{exponent + 1}; "
            "divide the rewards"
        )
    return restored
