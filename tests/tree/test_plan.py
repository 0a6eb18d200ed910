"""Packing keeps every branch, cuts no tree and respects the budget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.forests import sequence_sets
from treering.errors import InputError
from treering.tree.forest import Forest
from treering.tree.plan import plan_batch


@given(st.lists(sequence_sets(min_sequences=0), max_size=4), st.integers(0, 40))
def test_a_plan_holds_every_branch_once_within_the_budget(sets: list[list[list[int]]], spare: int) -> None:
    forests = [Forest.from_sequences(sequences) for sequences in sets]
    largest = max((tree.num_tokens for forest in forests for tree in forest.trees()), default=1)
    plan = plan_batch(forests, largest + spare)
    flat = [sequence for sequences in sets for sequence in sequences]
    seen = {}
    for batch in plan.micro_batches:
        assert 0 < batch.forest.num_tokens <= largest + spare
        for local, branch in enumerate(batch.branches.tolist()):
            assert branch not in seen
            seen[branch] = batch.forest.tokens[batch.forest.path(local)].tolist()
    assert [seen[i] for i in range(len(flat))] == flat
    assert plan.num_tokens == sum(forest.num_tokens for forest in forests)
    assert plan.num_branch_tokens == sum(map(len, flat))


def test_two_prompts_with_four_samples_stay_2840_tokens_at_every_cap() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, 500) for _ in range(2)]
    sequences = [np.concatenate([prompts[i % 2], [1000 + i], rng.integers(0, 1000, 229)]) for i in range(8)]
    forest = Forest.from_sequences(sequences)
    assert forest.num_tokens == 2840
    for cap in (1420, 1536, 2048, 2560, 4096):
        assert plan_batch([forest], cap).num_tokens == 2840


def test_first_fit_fills_micro_batches() -> None:
    forests = [Forest.from_sequences([list(range(n))]) for n in (5, 4, 3)]
    plan = plan_batch(forests, 8)
    assert [batch.branches.tolist() for batch in plan.micro_batches] == [[0, 2], [1]]


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(9, 20))
def test_packing_is_first_fit_by_falling_size(sizes: list[int], capacity: int) -> None:
    bins: list[list[int]] = []
    for tree in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fitting = [members for members in bins if sum(sizes[i] for i in members) + sizes[tree] <= capacity]
        if fitting:
            fitting[0].append(tree)
        else:
            bins.append([tree])
    plan = plan_batch([Forest.from_sequences([[1] * size]) for size in sizes], capacity)
    assert [batch.branches.tolist() for batch in plan.micro_batches] == sorted(sorted(members) for members in bins)


def test_no_budget_means_one_micro_batch_and_nothing_means_none() -> None:
    forests = [Forest.from_sequences([[1, 2]]), Forest.from_sequences([]), Forest.from_sequences([[1, 2]])]
    assert [batch.branches.tolist() for batch in plan_batch(forests).micro_batches] == [[0, 1]]
    assert plan_batch([]).micro_batches == ()
    assert plan_batch([]).sharing == 0.0


def test_a_tree_over_the_budget_is_refused_with_the_budget_it_needs() -> None:
    forests = [Forest.from_sequences([[1]]), Forest.from_sequences([[1, 2, 3, 4], [1, 5]])]
    with pytest.raises(InputError, match=r"tree 1 has 5 distinct tokens.*max_tokens=4.*at least 5"):
        plan_batch(forests, 4)
    with pytest.raises(InputError, match="at least 1, or None, got 0"):
        plan_batch(forests, 0)
