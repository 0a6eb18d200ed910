"""Advantages of rollouts in their groups, of branches of runs, and of the nodes of trees."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from treering.arrays import Float64Array, Int64Array
from treering.config.steps import Normalizer
from treering.errors import ConfigError, InputError
from treering.rl.collect import Group
from treering.tree.forest import Forest

Estimator = Literal["grpo", "dr_grpo", "rloo"]
"""grpo: (r - mean) / (std + 1e-6) (arXiv 2402.03300). dr_grpo: r - mean (arXiv 2503.20783). rloo: r - mean of
the others (arXiv 2402.14740)."""

EPSILON = 1e-6
"""Added to the standard deviation; verl's value (TRL adds 1e-4)."""


def group_advantages(rewards: NDArray[np.float64], estimator: Estimator) -> NDArray[np.float64]:
    """Return the advantages of one group, in its order.

    The standard deviation is the sample's, with G - 1 in the denominator, as in TRL and verl. Groups with equal rewards
    or a single rollout have advantages of exactly 0.

    Args:
        rewards: float64 [G], finite.
        estimator: how rewards are compared, see `Estimator`.

    Returns:
        float64 [G].

    Raises:
        ConfigError: an unknown estimator.
        InputError: rewards are not a flat list of finite numbers, or float64 cannot hold their differences.

    Example: rewards [1, 0, 0, 0] have mean 0.25 and standard deviation 0.5: grpo gives [1.5, -0.5, -0.5, -0.5],
    dr_grpo [0.75, -0.25, -0.25, -0.25] and rloo [1, -1/3, -1/3, -1/3].
    """
    if estimator not in get_args(Estimator):
        raise ConfigError(f"an estimator is one of {', '.join(get_args(Estimator))}, got {estimator!r}; choose one")
    if rewards.ndim != 1 or not np.isfinite(rewards).all():
        raise InputError(f"rewards must be a flat list of finite numbers, got {rewards}; drop the other rollouts")
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
    """Divide numbers above 1 by a power of two, which is exact, so that their sums and squares stay finite.

    Returns:
        The numbers, at most 1 in magnitude, and the exponent e of their factor 2^-e; 0 if nothing was divided.

    Example: [3, -8] gives [0.1875, -0.5] and 4; [0.5, 0.25] stays, with 0.
    """
    exponent = max(0, int(np.frexp(np.abs(values).max(initial=0.0))[1]))
    return np.ldexp(values, -exponent), exponent


def unscaled(values: NDArray[np.float64], exponent: int) -> NDArray[np.float64]:
    """Undo `scaled`."""
    with np.errstate(over="ignore"):
        restored: NDArray[np.float64] = np.ldexp(values, exponent)
    if not np.isfinite(restored).all():
        raise InputError(
            f"float64 must hold the differences of a group's rewards, got differences up to 2^{exponent + 1}; "
            "divide the rewards"
        )
    return restored


Float64s: TypeAlias = NDArray[np.float64]

BranchAdvantages: TypeAlias = Float64s | list[Float64s]
"""float64 [B], or one array per branch with an entry per token if calls have their own rewards."""


def branch_advantages(group: Group, estimator: Estimator) -> BranchAdvantages:
    """Return the advantages of a group's branches, in its order.

    If calls have rewards, the k-th calls of all runs are compared; a run with fewer calls counts with its own reward.

    Example: a run of two branches with reward 1 and a run of one branch with reward 0 have the dr_grpo advantages
    [0.5, 0.5, -0.5].
    """
    runs = group.runs
    if runs is None:
        return group_advantages(group.rewards, estimator)
    if not any(runs.turn_rewards):
        return group_advantages(group.rewards, estimator)[np.array(runs.of, np.int64)]
    # A run without rewards of calls may have more calls than those with some.
    num_calls = 1 + max(int(turns.max(initial=-1)) for turns in runs.turns)
    # What each run earns from its k-th call on, for the K calls of the longest run: float64 [K, R].
    table = np.zeros((num_calls, group.rewards.size))
    for run, values in enumerate(runs.turn_rewards):
        table[: len(values), run] = values
    worth = group.rewards + table[::-1].cumsum(0)[::-1]
    of_turns = np.stack([group_advantages(row, estimator) for row in worth])
    return [
        np.where(turns >= 0, of_turns[np.maximum(turns, 0), run], 0.0)
        for run, turns in zip(runs.of, runs.turns, strict=True)
    ]


def branch_weights(groups: Sequence[Group], normalizer: Normalizer) -> list[float]:
    """Return the factors of all branches' advantages that make each run count as one sequence.

    A mean over sequences becomes one over runs, and a mean inside a sequence one over all trained tokens of the run.
    Policy losses are proportional to advantages; a KL or an entropy bonus in the loss still counts branches.

    Example: two runs, one with branches of 30 and 10 trained tokens and one with a single branch, have the
    sequence_mean weights 0.75 * 3/2, 0.25 * 3/2 and 3/2.
    """
    if normalizer not in ("sequence_mean", "sequence_sum", "tree_mean"):
        return [1.0 for group in groups for _ in group.rollouts]
    num_branches = sum(len(group.rollouts) for group in groups)
    num_counted = sum(len(group.rollouts) if group.runs is None else group.rewards.size for group in groups)
    found: list[float] = []
    for group in groups:
        # A tree's mean is taken inside the tree, so only its own branches and runs count.
        sizes = (len(group.rollouts), group.rewards.size) if normalizer == "tree_mean" else (num_branches, num_counted)
        ratio = 1.0 if group.runs is None and normalizer == "tree_mean" else sizes[0] / sizes[1]
        found += [ratio * share for share in _shares(group, normalizer)]
    return found


def _shares(group: Group, normalizer: Normalizer) -> list[float]:
    """Return each branch's share of its run's trained tokens if they are averaged, else 1."""
    if group.runs is None or normalizer != "sequence_mean":
        return [1.0] * len(group.rollouts)
    trained = np.array([int(rollout.loss_mask[1:].sum()) for rollout in group.rollouts], np.float64)
    of = np.array(group.runs.of, np.int64)
    totals = np.bincount(of, weights=trained)
    return (trained / np.maximum(totals[of], 1.0)).tolist()  # type: ignore[no-any-return]


Baseline = Literal["parent", "siblings", "leave_one_out", "root", "tree_rl", "tree_grpo"]
"""Value that a node is compared with; the formulas are in `tree_advantages`."""

ScaleRewards = Literal["none", "group"]
"""none: raw rewards. group: divided by the standard deviation of their group, plus 1e-6 (named as in TRL)."""

Ids = Sequence[int] | Sequence[str] | NDArray[np.integer[Any]]


def tree_advantages(
    forest: Forest,
    leaf_rewards: Sequence[float] | NDArray[Any],
    baseline: Baseline = "parent",
    *,
    scale_rewards: ScaleRewards = "none",
    groups: Ids | None = None,
    trees: Ids | None = None,
) -> list[Float64Array]:
    """Return step-level advantages: how much better a node of the tree is than its baseline.

    Every branch ends in its own leaf. A node is a maximal run of tokens that the same branches pass through: a segment,
    split where a branch ends inside it. V(n) is the mean reward of the branches through n; duplicates and branches that
    end inside others' paths count once each. p(n) is the node above n. The root is the start of the group, before its
    first token, and V(root) is the mean reward of the group. `baseline` defines the advantage A(n):

    - parent: V(n) - V(p(n)).
    - siblings: V(n) minus the mean of V over the children of p(n) including n, each child counted once (the step groups
      of TreeRPO, arXiv 2506.05183, unscaled). Branches that end at p(n) are one more child, whose value is their mean
      reward.
    - leave_one_out: the same without n itself in the mean (RLOO, arXiv 2402.14740, at each branch point).
    - root: V(n) - V(root). On policy it has the gradient of one advantage r - V(root) per branch (with shared="sum",
      masks that are equal on shared tokens, and a normalizer that weighs branches equally: not sequence_mean).
    - tree_rl: (V(n) - V(root) + V(n) - V(p(n))) / sqrt(L(n)), where L(n) branches pass through n: TreeRL's global and
      local advantage and its weight (arXiv 2506.11902).
    - tree_grpo: the mean over the branches through n of (r - mean) / (std + 1e-6) in the branch's group plus the same
      in its tree: Tree-GRPO's inter-tree and intra-tree advantages (arXiv 2509.21240, and the estimator "tree" of its
      code, which gives them to whole branches). On policy the gradient is the same, as for root.

    A node without siblings has nothing to be compared with: tokens that all branches of a group share have advantage 0
    (tree_grpo: within rounding), and so does a group with equal rewards. If a prompt's completions differ from their
    first token on, parent, siblings and root give Dr. GRPO's r - mean (GRPO's advantage with scale_rewards="group"),
    and leave_one_out gives RLOO's.

    Args:
        forest: a forest with K branches.
        leaf_rewards: K finite numbers, in the order of the branches.
        baseline: see above.
        scale_rewards: see `ScaleRewards`. Uses the sample deviation. Refused for tree_grpo, which divides already.
        groups: K strings or integers, equal for rollouts of the same prompt. By default every tree of the forest is a
            group, as in normalizer="tree_mean". Needed if prompts share their first token, or if rollouts of a prompt
            do not.
        trees: K strings or integers, for tree_grpo: equal for rollouts that were branched from the same first rollout.
            The forest cannot tell: independent rollouts may begin with the same tokens.

    Returns:
        K arrays, float64 with one entry per token of the branch, for `advantages` of any policy objective. Branches
        have the same values at tokens that they share. O(N + F) time and memory.

    Raises:
        InputError: rewards or ids are not one per branch, a reward is not finite, or float64 cannot hold their
            differences.
        ConfigError: an unknown option, `trees` missing or without tree_grpo, or scaled rewards with tree_grpo.

    Example: two answers share a step.
        >>> forest = Forest.from_sequences([[1, 3, 5], [1, 3, 6], [1, 4]])
        >>> [advantages.tolist() for advantages in tree_advantages(forest, [9, 3, 0])]
        [[0.0, 2.0, 3.0], [0.0, 2.0, -3.0], [0.0, -4.0]]
        >>> [advantages.tolist() for advantages in tree_advantages(forest, [9, 3, 0], "siblings")]
        [[0.0, 3.0, 3.0], [0.0, 3.0, -3.0], [0.0, -3.0]]
    """
    _check_options(baseline, scale_rewards, trees)
    rewards = _as_rewards(leaf_rewards, forest.num_branches)
    tree_ids = [0] * rewards.size if trees is None else _as_ids("trees", trees, rewards.size)
    advantages = [np.zeros(0)] * rewards.size
    for branches, group in _groups(forest, groups):
        scores = group_advantages(rewards[branches], "dr_grpo" if scale_rewards == "none" else "grpo")
        if baseline == "tree_grpo":
            scores = group_advantages(rewards[branches], "grpo")
            for own in _members([tree_ids[branch] for branch in branches]).values():
                scores[own] += group_advantages(rewards[branches[own]], "grpo")
        # Every baseline is linear in the scores.
        scores, exponent = scaled(scores)
        for branch, values in zip(branches.tolist(), _of_group(group, scores, baseline), strict=True):
            advantages[branch] = unscaled(values, exponent)
    return advantages


def _of_group(forest: Forest, scores: Float64Array, baseline: Baseline) -> list[Float64Array]:
    """Return the advantages of a group's branches.

    The M nodes cover the tokens in packed order, without gaps. Their tables of children begin with the root's.
    """
    start = np.union1d(forest.segment_start, forest.branch_end.astype(np.int64) + 1)
    start = start[start < forest.num_tokens]
    # The branches through a token are those that end in its subtree, and a subtree is a range of packed indices.
    ends = forest.subtree_end[start]
    num_ending = np.bincount(forest.branch_end, minlength=forest.num_tokens)
    ending_score = np.bincount(forest.branch_end, weights=scores, minlength=forest.num_tokens)
    num_before, score_before = np.append(0, num_ending.cumsum()), np.append(0.0, ending_score.cumsum())
    num_branches = num_before[ends] - num_before[start]
    value = (score_before[ends] - score_before[start]) / num_branches
    root_value = float(score_before[-1] / forest.num_branches)
    above = forest.parent[start]
    parent = np.where(above < 0, -1, np.searchsorted(start, above, side="right") - 1)
    over_parent, over_root = value - np.append(root_value, value)[parent + 1], value - root_value
    # Branches end at the last token of a node, and are one child of it. A leaf's own sums are not read.
    last = np.append(start[1:], forest.num_tokens) - 1
    stops = num_ending[last]
    child_sum = np.bincount(parent + 1, weights=value, minlength=start.size + 1)
    child_sum = (child_sum + np.append(0.0, ending_score[last] / np.maximum(stops, 1)))[parent + 1]
    num_children = (np.bincount(parent + 1, minlength=start.size + 1) + np.append(0, stops > 0))[parent + 1]
    of_nodes: Float64Array
    match baseline:
        case "parent":
            of_nodes = over_parent
        case "siblings":
            of_nodes = value - child_sum / num_children
        case "leave_one_out":
            # Only the root of a group can be an only child; it is compared with nothing.
            others = (child_sum - value) / np.maximum(num_children - 1, 1)
            of_nodes = np.where(num_children > 1, value - others, 0.0)
        case "root":
            of_nodes = over_root
        case "tree_rl":
            of_nodes = (over_root + over_parent) / np.sqrt(num_branches)
        case "tree_grpo":
            of_nodes = value
    of_tokens = np.repeat(of_nodes, np.diff(start, append=forest.num_tokens))
    indices, offsets = forest.paths()
    return np.split(of_tokens[indices], offsets[1:-1])


def _groups(forest: Forest, groups: Ids | None) -> Iterator[tuple[Int64Array, Forest]]:
    """Yield the branches of each group with their forest."""
    if groups is None:
        yield from zip(forest.branches_by_tree(), forest.trees(), strict=True)
        return
    for branches in _members(_as_ids("groups", groups, forest.num_branches)).values():
        yield branches, forest.take_branches(branches.tolist())


def _members(ids: Sequence[int | str]) -> dict[int | str, Int64Array]:
    members: dict[int | str, list[int]] = {}
    for branch, name in enumerate(ids):
        members.setdefault(name, []).append(branch)
    return {name: np.array(branches) for name, branches in members.items()}


def _as_ids(name: str, ids: Ids, num_branches: int) -> list[int | str]:
    listed: list[Any] = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if len(listed) != num_branches:
        raise InputError(f"{name} needs one id per branch, got {len(listed)} for {num_branches} branches")
    bad = [item for item in listed if not isinstance(item, int | str | np.integer)]
    if bad:
        raise InputError(f"{name} holds strings or integers, got {bad[0]!r}; number them instead")
    return listed


def _as_rewards(leaf_rewards: Sequence[float] | NDArray[Any], num_branches: int) -> Float64Array:
    try:
        rewards = np.asarray(leaf_rewards, np.float64)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"leaf_rewards is a flat list of numbers, one per branch ({error})") from error
    if rewards.shape != (num_branches,):
        raise InputError(
            f"leaf_rewards needs one number per branch, duplicates and prefixes too: got shape {rewards.shape} for "
            f"{num_branches} branches"
        )
    bad = np.flatnonzero(~np.isfinite(rewards))
    if bad.size:
        raise InputError(f"leaf_rewards[{bad[0]}] must be finite, got {rewards[bad[0]]}; drop that branch")
    return rewards


def _check_options(baseline: Baseline, scale_rewards: ScaleRewards, trees: Ids | None) -> None:
    if baseline not in get_args(Baseline):
        raise ConfigError(f"a baseline is one of {', '.join(get_args(Baseline))}, got {baseline!r}; choose one")
    if scale_rewards not in get_args(ScaleRewards):
        raise ConfigError(f"scale_rewards is one of {', '.join(get_args(ScaleRewards))}, got {scale_rewards!r}")
    if (baseline == "tree_grpo") != (trees is not None):
        raise ConfigError(
            f'trees belong to baseline="tree_grpo" and only to it, got {baseline!r} and '
            f"{'no trees' if trees is None else 'trees'}; say which rollouts share a first rollout"
        )
    if baseline == "tree_grpo" and scale_rewards != "none":
        raise ConfigError(
            f'baseline="tree_grpo" divides by deviations already, got scale_rewards={scale_rewards!r}; remove it'
        )
