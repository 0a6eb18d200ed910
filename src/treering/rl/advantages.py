"""Advantages of groups, and of runs with several branches."""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from treering.errors import ConfigError, InputError
from treering.rl.collect import Group
from treering.train.loss_weights import Normalizer

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


Float64s: TypeAlias = NDArray[np.float64]

BranchAdvantages: TypeAlias = Float64s | list[Float64s]
"""float64 [B], or, where calls have rewards of their own, one array per branch with an entry per token."""


def branch_advantages(group: Group, estimator: Estimator) -> BranchAdvantages:
    """The advantages of a group's branches, in its order.

    Where calls have rewards, the k-th calls of all runs are compared; a run with fewer calls is worth its own reward
    there.

    Example: runs with the rewards 1 and 0, of two branches and one, have the dr_grpo advantages [0.5, 0.5, -0.5].
    """
    runs = group.runs
    if runs is None:
        return group_advantages(group.rewards, estimator)
    if not any(runs.turn_rewards):
        return group_advantages(group.rewards, estimator)[np.array(runs.of, np.int64)]
    # A run without rewards of calls may have more calls than those with some.
    num_calls = 1 + max(int(turns.max(initial=-1)) for turns in runs.turns)
    worth = _worth(group.rewards, runs.turn_rewards, num_calls)
    of_turns = np.stack([group_advantages(row, estimator) for row in worth])
    return [
        np.where(turns >= 0, of_turns[np.maximum(turns, 0), run], 0.0)
        for run, turns in zip(runs.of, runs.turns, strict=True)
    ]


def branch_weights(groups: Sequence[Group], normalizer: Normalizer) -> list[float]:
    """What the advantages of all branches are multiplied with, so that each run counts as one sequence.

    A mean over sequences then is one over runs, and a mean inside a sequence is one over all trained tokens of the run.
    Policy losses are proportional to advantages; a KL or an entropy bonus in the loss counts branches.

    Example: of a run with two branches of 30 and 10 trained tokens and one with a single branch, three branches in all,
    sequence_mean has the weights 0.75 * 3/2, 0.25 * 3/2 and 3/2.
    """
    if normalizer not in ("sequence_mean", "sequence_sum", "tree_mean"):
        return [1.0 for group in groups for _ in group.rollouts]
    num_branches = sum(len(group.rollouts) for group in groups)
    num_counted = sum(len(group.rollouts) if _counts_branches(group) else group.rewards.size for group in groups)
    found: list[float] = []
    for group in groups:
        # A tree is a mean of its own.
        sizes = (len(group.rollouts), group.rewards.size) if normalizer == "tree_mean" else (num_branches, num_counted)
        ratio = 1.0 if _counts_branches(group) and normalizer == "tree_mean" else sizes[0] / sizes[1]
        found += [ratio * share for share in _shares(group, normalizer)]
    return found


def _counts_branches(group: Group) -> bool:
    return group.runs is None or group.runs.weights == "branches"


def _shares(group: Group, normalizer: Normalizer) -> list[float]:
    """Of each branch, its share of the trained tokens of its run where those are averaged; else 1."""
    if group.runs is None or _counts_branches(group) or normalizer != "sequence_mean":
        return [1.0] * len(group.rollouts)
    trained = np.array([int(rollout.loss_mask[1:].sum()) for rollout in group.rollouts], np.float64)
    of = np.array(group.runs.of, np.int64)
    totals = np.bincount(of, weights=trained)
    return (trained / np.maximum(totals[of], 1.0)).tolist()  # type: ignore[no-any-return]


def _worth(rewards: Float64s, turn_rewards: Sequence[Sequence[float]], num_calls: int) -> Float64s:
    """float64 [K, R]: what each run earns from its k-th call on, for the K calls of the longest run."""
    table = np.zeros((num_calls, rewards.size))
    for run, values in enumerate(turn_rewards):
        table[: len(values), run] = values
    return rewards + table[::-1].cumsum(0)[::-1]  # type: ignore[no-any-return]
