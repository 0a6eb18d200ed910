"""Advantages of the branches of a group, and how much each counts. Pure functions.

Runs are compared, however many branches each has. A call with rewards of its own is worth what the run earns from it
on: the run's reward, and the rewards of this and later calls.

    B branches   R runs   K most calls of a run
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from treering.rl.advantages import Estimator, group_advantages
from treering.rl.collect import Group
from treering.train.loss_weights import Normalizer

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
    worth = _worth(group.rewards, runs.turn_rewards)
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


def _worth(rewards: Float64s, turn_rewards: Sequence[Sequence[float]]) -> Float64s:
    """float64 [K, R]: what each run earns from its k-th call on."""
    table = np.zeros((max(map(len, turn_rewards)), rewards.size))
    for run, values in enumerate(turn_rewards):
        table[: len(values), run] = values
    return rewards + table[::-1].cumsum(0)[::-1]  # type: ignore[no-any-return]
