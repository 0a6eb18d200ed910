"""What a forest costs, and that a tree is shared unless the cost model says that sharing loses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.forests import sequence_sets
from treering.errors import ConfigError
from treering.tree.forest import Forest
from treering.tree.plan.costs import CostModel
from treering.tree.plan.plan import plan_batch


def test_a_forest_costs_its_tokens_pairs_and_segments() -> None:
    costs = CostModel(token_s=1.0, pair_s=100.0, segment_s=10_000.0)
    forest = Forest.from_sequences([[5, 6, 7], [5, 6, 8]])
    assert costs.of(forest) == 4 + 100 * (1 + 2 + 3 + 3) + 10_000 * 3
    assert costs.of_branches(forest) == 6 + 100 * 12 + 10_000 * 2
    assert costs.cost(2, 3, 4) == 2 + 300 + 40_000
    assert costs.of(Forest.from_sequences([])) == 0.0


def test_costs_are_finite_and_not_negative() -> None:
    with pytest.raises(ConfigError, match=r"pair_s .*>= 0, got -1"):
        CostModel(token_s=1.0, pair_s=-1.0, segment_s=0.0)
    with pytest.raises(ConfigError, match="three zeros"):
        CostModel(token_s=0.0, pair_s=0.0, segment_s=0.0)


BY_SEGMENT = CostModel(token_s=0.001, pair_s=0.0, segment_s=1.0)


def branches_of(forest: Forest) -> list[list[int]]:
    return [forest.tokens[forest.path(i)].tolist() for i in range(forest.num_branches)]


def test_a_tree_with_many_segments_is_planned_as_chains_where_segments_cost() -> None:
    # 3 segments as a tree, 2 as chains; the second tree is a chain either way.
    forests = [Forest.from_sequences([[5, 6, 7], [5, 6, 8]]), Forest.from_sequences([[5, 6, 7]])]
    plan = plan_batch(forests, costs=BY_SEGMENT)
    [batch] = plan.micro_batches
    assert branches_of(batch.forest) == [[5, 6, 7], [5, 6, 8], [5, 6, 7]]
    assert batch.branches.tolist() == [0, 1, 2]
    assert batch.forest.num_trees == 3
    assert (plan.num_tokens, plan.sharing) == (9, 0.0)
    [why] = plan.unshared
    assert (why.tree, why.num_tokens, why.num_chain_tokens) == (0, 4, 6)
    assert np.allclose([why.tree_s, why.chains_s], [3.004, 2.006])
    assert why.in_words() in plan.in_words()
    assert "tree 0 is computed as separate chains (6 tokens, not 4): 2 s instead of 3 s" in plan.in_words()


def test_a_tie_is_shared() -> None:
    # 4 x 1 + 9 x 0 + 3 x 2 = 10 as a tree, 6 x 1 + 2 x 2 = 10 as chains.
    costs = CostModel(token_s=1.0, pair_s=0.0, segment_s=2.0)
    assert plan_batch([Forest.from_sequences([[5, 6, 7], [5, 6, 8]])], costs=costs).unshared == ()


@given(st.lists(sequence_sets(), max_size=3), st.floats(0, 1), st.floats(0, 1))
def test_no_tree_costs_more_than_its_chains_after_the_gate(
    sets: list[list[list[int]]], pair_s: float, segment_s: float
) -> None:
    costs = CostModel(token_s=0.1, pair_s=pair_s, segment_s=segment_s)
    plan = plan_batch([Forest.from_sequences(sequences) for sequences in sets], costs=costs)
    trees = [tree for forest in plan.forests for tree in forest.trees()]
    for tree in trees:
        lengths = [len(branch) for branch in branches_of(tree)]
        chains = sum(0.1 * n + pair_s * n * (n + 1) / 2 + segment_s for n in lengths)
        assert costs.of(tree) <= chains * (1 + 1e-9)
    for why in plan.unshared:
        assert why.tree_s > why.chains_s
