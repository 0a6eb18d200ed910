"""Advantages of nodes against their definition, written out over explicit paths."""

import math
import statistics
import tracemalloc
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.forests import SHAPES, sequence_sets, star
from treering import tree_advantages
from treering.errors import ConfigError, InputError
from treering.rl.advantages import Baseline, group_advantages
from treering.tree.forest import Forest

END = -1
"""Ends every path, so that branches end in leaves, and only there."""

RELATIVE: tuple[Baseline, ...] = ("parent", "siblings", "leave_one_out", "root", "tree_rl")
EPSILON = 1e-6
STEM = [[1, 3, 5], [1, 3, 6], [1, 3, 7], [1, 4]]
"""A prompt, a stem with three leaves, and another answer."""


class Paths:
    """The branches of one group as paths to END; a point of the tree is a prefix of them, () the root."""

    def __init__(self, sequences: list[list[int]], scores: list[float]) -> None:
        self.paths = [(*sequence, END) for sequence in sequences]
        self.scores = scores

    def through(self, point: tuple[int, ...]) -> list[float]:
        return [score for path, score in zip(self.paths, self.scores, strict=True) if path[: len(point)] == point]

    def value(self, point: tuple[int, ...]) -> float:
        return statistics.fmean(self.through(point))

    def children(self, point: tuple[int, ...]) -> set[tuple[int, ...]]:
        length = len(point) + 1
        return {path[:length] for path in self.paths if len(path) >= length and path[: len(point)] == point}

    def branch_point(self, point: tuple[int, ...]) -> tuple[int, ...]:
        """Return the point where the node of a point was chosen among others."""
        above = point[:-1]
        while above and len(self.children(above)) == 1:
            above = above[:-1]
        return above

    def advantage(self, point: tuple[int, ...], baseline: str) -> float:
        above = self.branch_point(point)
        node = next(child for child in self.children(above) if point[: len(child)] == child)
        value = self.value(node)
        if baseline == "parent":
            return value - self.value(above)
        if baseline == "root":
            return value - self.value(())
        if baseline == "tree_rl":
            return (2 * value - self.value(()) - self.value(above)) / math.sqrt(len(self.through(node)))
        if baseline == "tree_grpo":
            return value
        others = [self.value(child) for child in self.children(above) if child != node or baseline == "siblings"]
        return value - statistics.fmean(others) if others else 0.0


def by_definition(
    sequences: list[list[int]], scores: list[float], baseline: str, groups: list[int]
) -> list[list[float]]:
    members = {group: [i for i, other in enumerate(groups) if other == group] for group in groups}
    paths = {g: Paths([sequences[i] for i in m], [scores[i] for i in m]) for g, m in members.items()}
    return [
        [paths[groups[i]].advantage(tuple(s[: t + 1]), baseline) for t in range(len(s))]
        for i, s in enumerate(sequences)
    ]


def assert_close(actual: list[np.ndarray], expected: list[list[float]], scale: float) -> None:
    assert [row.dtype for row in actual] == [np.float64] * len(expected)
    assert [row.shape for row in actual] == [(len(row),) for row in expected]
    # Prefix sums of at most 200 rewards of size `scale`, each with relative error 2.2e-16.
    np.testing.assert_allclose(np.concatenate(actual), np.concatenate(expected), rtol=0, atol=200 * 2.3e-16 * scale)


@st.composite
def rewarded(draw: st.DrawFn) -> tuple[list[list[int]], list[float]]:
    sequences = draw(sequence_sets(max_sequences=8, max_extra=6))
    rewards = draw(st.lists(st.floats(-10, 10), min_size=len(sequences), max_size=len(sequences)))
    return sequences, rewards


@pytest.mark.parametrize("baseline", RELATIVE)
@given(data=rewarded(), seed=st.integers(0, 99))
def test_every_baseline_is_its_definition_within_each_group_whatever_tokens_groups_share(
    baseline: Baseline, data: tuple[list[list[int]], list[float]], seed: int
) -> None:
    sequences, rewards = data
    groups = np.random.default_rng(seed).integers(0, 3, len(sequences))
    actual = tree_advantages(Forest.from_sequences(sequences), rewards, baseline, groups=groups)
    expected = by_definition(sequences, rewards, baseline, groups.tolist())
    assert_close(actual, expected, scale=40)
    named = tree_advantages(Forest.from_sequences(sequences), rewards, baseline, groups=[f"q{g}" for g in groups])
    assert [row.tolist() for row in named] == [row.tolist() for row in actual]


@given(data=rewarded(), seed=st.integers(0, 99))
def test_tree_grpo_is_the_mean_of_both_group_advantages_over_the_branches_of_a_node(
    data: tuple[list[list[int]], list[float]], seed: int
) -> None:
    sequences, rewards = data
    rewards = [round(reward) for reward in rewards]  # deviations of 0 or well above the rounding of a mean
    trees = np.random.default_rng(seed).integers(0, 2, len(sequences)).tolist()
    scores = [
        sum(
            normalized(rewards[i], [rewards[j] for j in range(len(rewards)) if same(i, j)])
            for same in (lambda i, j: True, lambda i, j: trees[i] == trees[j])
        )
        for i in range(len(rewards))
    ]
    one_group = [0] * len(sequences)
    actual = tree_advantages(Forest.from_sequences(sequences), rewards, "tree_grpo", groups=one_group, trees=trees)
    assert_close(actual, by_definition(sequences, scores, "tree_grpo", one_group), scale=40)


def normalized(reward: float, rewards: list[float]) -> float:
    if len(set(rewards)) == 1:
        return 0.0
    return (reward - statistics.fmean(rewards)) / (statistics.stdev(rewards) + EPSILON)


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=9))
def test_a_plain_group_has_the_group_s_own_advantages_on_its_completions(rewards: list[int]) -> None:
    sequences = star(len(rewards), prompt=4, response=3)
    forest, array = Forest.from_sequences(sequences), np.array(rewards, np.float64)
    options: list[tuple[str, dict[str, Any]]] = [
        *(("dr_grpo", {"baseline": baseline}) for baseline in ("parent", "siblings", "root")),
        ("rloo", {"baseline": "leave_one_out"}),
        *(("grpo", {"baseline": b, "scale_rewards": "group"}) for b in ("parent", "siblings", "root")),
    ]
    for estimator, option in options:
        expected = [[0.0] * 4 + [a] * 3 for a in group_advantages(array, estimator).tolist()]  # type: ignore[arg-type]
        assert_close(tree_advantages(forest, rewards, **option), expected, scale=100)
    one_tree = tree_advantages(forest, rewards, "tree_grpo", trees=[0] * len(rewards))
    assert_close(one_tree, [[0.0] * 4 + [2 * a] * 3 for a in group_advantages(array, "grpo").tolist()], scale=100)


@pytest.mark.parametrize("baseline", get_args(Baseline))
def test_equal_rewards_have_advantages_of_exactly_zero(baseline: Baseline) -> None:
    sequences = SHAPES["bushy"]
    for scale_rewards in ("none", "group") if baseline != "tree_grpo" else ("none",):
        advantages = tree_advantages(
            Forest.from_sequences(sequences),
            [0.1] * len(sequences),
            baseline,
            scale_rewards=scale_rewards,  # type: ignore[arg-type]
            trees=[i % 3 for i in range(len(sequences))] if baseline == "tree_grpo" else None,
        )
        assert not np.concatenate(advantages).any()


def test_a_tree_is_a_group_unless_groups_are_given() -> None:
    forest = Forest.from_sequences([[1, 5], [1, 6], [2, 5]])
    assert [row.tolist() for row in tree_advantages(forest, [2, 0, 7])] == [[0, 1], [0, -1], [0, 0]]
    assert [row.tolist() for row in tree_advantages(forest, [2, 0, 7], groups=["q", "q", "q"])] == [
        [-2, 1],
        [-2, -1],
        [4, 4],
    ]


def test_memory_follows_the_tokens_of_the_branches() -> None:
    stem = list(range(20_000))
    forest = Forest.from_sequences([stem + [100_000 + i] * 5_000 for i in range(4)])
    tracemalloc.start()
    tree_advantages(forest, [1, 0, 0, 1], "siblings")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 8 * (forest.num_tokens + forest.num_branch_tokens)


@pytest.mark.parametrize(
    ("rewards", "options", "error", "message"),
    [
        ([1, 0], {}, InputError, r"one number per branch, duplicates.*got shape \(2,\) for 4"),
        ([[1], [0], [0], [1]], {}, InputError, r"got shape \(4, 1\) for 4"),
        ([1, [0, 1], 1, 0], {}, InputError, "flat list of numbers, one per branch"),
        (["a", 1, 1, 1], {}, InputError, "flat list of numbers, one per branch"),
        ([1, 0, math.nan, 1], {}, InputError, r"leaf_rewards\[2\] must be finite, got nan; drop that branch"),
        ([0] * 4, {"groups": [1, 2]}, InputError, "groups needs one id per branch, got 2 for 4 branches"),
        ([0] * 4, {"groups": [1, 2, 2.5, 1]}, InputError, "groups holds strings or integers, got 2.5"),
        ([0] * 4, {"baseline": "tree_grpo", "trees": [1]}, InputError, "trees needs one id per branch, got 1"),
        ([0] * 4, {"baseline": "mean"}, ConfigError, "one of parent, siblings, .*got 'mean'"),
        ([0] * 4, {"scale_rewards": "batch"}, ConfigError, "one of none, group, got 'batch'"),
        ([0] * 4, {"baseline": "tree_grpo"}, ConfigError, "'tree_grpo' and no trees; say which rollouts"),
        ([0] * 4, {"trees": [0] * 4}, ConfigError, "only to it, got 'parent' and trees"),
        (
            [0] * 4,
            {"baseline": "tree_grpo", "trees": [0] * 4, "scale_rewards": "group"},
            ConfigError,
            "divides by deviations already",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    rewards: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tree_advantages(Forest.from_sequences(STEM), rewards, **options)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=7),
    st.data(),
    st.integers(-900, 900),
    st.sampled_from(RELATIVE),
)
def test_advantages_grow_with_rewards_of_any_size(
    sequences: list[list[int]], data: st.DataObject, exponent: int, baseline: Baseline
) -> None:
    rewards = data.draw(st.lists(st.integers(0, 100), min_size=len(sequences), max_size=len(sequences)))
    forest = Forest.from_sequences(sequences)
    plain = tree_advantages(forest, rewards, baseline)
    scaled = tree_advantages(forest, np.ldexp(np.array(rewards, float), exponent), baseline)
    for values, expected in zip(scaled, plain, strict=True):
        np.testing.assert_allclose(np.ldexp(values, -exponent), expected, rtol=1e-12, atol=1e-12)
