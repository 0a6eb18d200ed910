"""Advantages per node and per token work in every policy objective and equal one per branch where they agree."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import assert_gradients_equal, build_float64, take_gradients
from treering.model.forward import forward
from treering.objectives import Objective, grpo, gspo, rloo
from treering.rl.advantages import Baseline, tree_advantages
from treering.train.step import backward
from treering.tree.forest import Forest

EXACT = 1e-10
MODEL = build_float64()
MAKERS = [grpo, gspo, rloo]
GROUP = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 6], [1, 2, 3], [1, 7, 7]]
"""A stem with leaves, a duplicate, a branch that ends inside the stem, and a branch next to it."""
MASKS = [[0] + [1] * (len(sequence) - 1) for sequence in GROUP]
REWARDS = [1.0, 0.0, 0.5, 0.25, 2.0]

STEM = Forest.from_sequences([[1, 3, 5], [1, 3, 6], [1, 3, 7], [1, 4]])
STEM_MASKS = [[0, 1, 1], [0, 1, 1], [0, 1, 1], [0, 1]]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("baseline", "options"), [("root", {}), ("tree_grpo", {"trees": [0, 0, 0, 1, 1]})])
def test_means_over_the_branches_of_a_node_have_the_gradient_of_one_advantage_per_branch(
    make: Callable[..., Objective], baseline: Baseline, options: dict[str, Any]
) -> None:
    forest, rewards = Forest.from_sequences(GROUP), np.array(REWARDS)
    of_branches = rewards - rewards.mean()
    if baseline == "tree_grpo":
        of_branches = of_branches / (rewards.std(ddof=1) + 1e-6)
        for tree in (slice(0, 3), slice(3, 5)):
            inside = rewards[tree]
            of_branches[tree] += (inside - inside.mean()) / (inside.std(ddof=1) + 1e-6)
    backward(MODEL, forest, make(of_branches, MASKS, normalizer="token_mean"))
    expected = take_gradients(MODEL)
    of_nodes = tree_advantages(forest, REWARDS, baseline, **options)
    backward(MODEL, forest, make(of_nodes, MASKS, normalizer="token_mean"))
    assert_gradients_equal(take_gradients(MODEL), expected, EXACT)


@pytest.mark.parametrize(
    ("baseline", "shared", "weights"),
    [
        # Packed order: prompt, stem, its three leaves, the answer next to the stem.
        ("parent", "sum", [0, 3 * 1, 2, 2, -4, -3]),
        ("parent", "once", [0, 1, 2, 2, -4, -3]),
        ("siblings", "sum", [0, 3 * 2, 2, 2, -4, -2]),
        ("siblings", "once", [0, 2, 2, 2, -4, -2]),
    ],
)
def test_the_stem_of_three_leaves_counts_three_times_or_once(
    baseline: Baseline, shared: Any, weights: list[float]
) -> None:
    assert STEM.tokens.tolist() == [1, 3, 5, 6, 7, 4]
    logprobs = forward(MODEL, STEM).logprobs
    (-torch.tensor(weights, dtype=torch.float64) * logprobs).sum().backward()  # type: ignore[no-untyped-call]
    expected = take_gradients(MODEL)
    advantages = tree_advantages(STEM, [6, 6, 0, 0], baseline)
    result = backward(MODEL, STEM, grpo(advantages, STEM_MASKS, normalizer="sum", shared=shared))
    assert_gradients_equal(take_gradients(MODEL), expected, EXACT)
    assert result.loss == pytest.approx(-sum(weights), abs=1e-12)
    assert result.num_trained_tokens == {"sum": 7, "once": 5}[shared]


@pytest.mark.parametrize(("baseline", "shared"), [("parent", "sum"), ("siblings", "once")])
def test_the_counted_advantages_of_every_branch_point_sum_to_zero(baseline: Baseline, shared: str) -> None:
    rewards = np.random.default_rng(5).normal(size=5)
    forest = Forest.from_sequences([[1, 3, 5, 6], [1, 3, 5, 7], [1, 3, 8, 2], [1, 4, 2, 2], [1, 4, 3, 3]])
    by_token: dict[int, list[float]] = {}
    for branch, row in enumerate(tree_advantages(forest, rewards, baseline)):
        for token, advantage in zip(forest.path(branch).tolist(), row.tolist(), strict=True):
            by_token.setdefault(token, []).append(advantage)
    is_start = np.isin(np.arange(forest.num_tokens), forest.segment_start)
    for point in np.unique(forest.parent[is_start & (forest.parent >= 0)]).tolist():
        children = [token for token in np.flatnonzero(forest.parent == point).tolist() if is_start[token]]
        counted = [sum(by_token[token]) if shared == "sum" else by_token[token][0] for token in children]
        assert sum(counted) == pytest.approx(0, abs=1e-14)
