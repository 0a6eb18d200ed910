"""Packing keeps every branch and the budget, by first fit."""

from typing import Any

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


@pytest.mark.parametrize("order", ["grouped", "interleaved"])
def test_two_prompts_with_four_samples_stay_2840_tokens_at_every_cap(order: str) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, 500) for _ in range(2)]
    prompt_of = [0, 0, 0, 0, 1, 1, 1, 1] if order == "grouped" else [0, 1, 0, 1, 0, 1, 0, 1]
    sequences = [np.concatenate([prompts[p], [1000 + i], rng.integers(0, 1000, 229)]) for i, p in enumerate(prompt_of)]
    for forests in ([Forest.from_sequences(sequences)], [forest_of(sequences, prompt_of, p) for p in (0, 1)]):
        assert sum(forest.num_tokens for forest in forests) == 2840
        for cap in (100, 512, 710, 1024, 1419, 1420, 1536, 2048, 2560, 2839, 2840, 4096):
            plan = plan_batch(forests, cap)
            assert (plan.num_tokens, plan.num_branch_tokens) == (2840, 8 * 730)
            assert len(plan.partitioned) == (2 if cap < 1420 else 0)
            assert len(plan.micro_batches) == (0 if cap < 1420 else 2 if cap < 2840 else 1)


def forest_of(sequences: list[Any], prompt_of: list[int], prompt: int) -> Forest:
    return Forest.from_sequences([sequences[i] for i in range(8) if prompt_of[i] == prompt])


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(9, 20))
def test_trees_are_packed_by_first_fit_by_falling_size(sizes: list[int], capacity: int) -> None:
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


def test_a_tree_over_the_budget_is_partitioned_and_the_others_are_not() -> None:
    forests = [Forest.from_sequences([[1]]), Forest.from_sequences([[1, 2, 3, 4], [7], [1, 5]])]
    plan = plan_batch(forests, 4)
    assert [batch.branches.tolist() for batch in plan.micro_batches] == [[0, 2]]
    [tree] = plan.partitioned
    assert tree.branches.tolist() == [1, 3]
    assert tree.forest.tokens[tree.forest.path(1)].tolist() == [1, 5]
    assert sum(part.num_tokens for part in tree.partitions) == 5
    assert (plan.num_tokens, plan.num_branch_tokens, plan.num_branches) == (7, 8, 4)
    assert plan.num_micro_batches == 1 + len(tree.partitions) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "at least 1, or None, got 0"),
        ({"max_tokens": 8, "cut_tokens": 0}, "cut_tokens must be an integer of at least 1"),
        ({"max_tokens": 8, "fill_tokens": 0}, "fill_tokens must be an integer of at least 1"),
    ],
)
def test_options_of_no_plan_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_batch([Forest.from_sequences([[1]])], **options)


def test_trees_are_packed_up_to_a_fill_and_larger_ones_are_kept_separate() -> None:
    forests = [Forest.from_sequences([[i] * size]) for i, size in enumerate((9, 3, 2, 6, 2))]
    plan = plan_batch(forests, 8, fill_tokens=5)
    assert [batch.branches.tolist() for batch in plan.micro_batches] == [[1, 2], [3], [4]]
    assert [tree.branches.tolist() for tree in plan.partitioned] == [[0]]
    assert [batch.branches.tolist() for batch in plan_batch(forests, fill_tokens=5).micro_batches] == [
        [0],
        [1, 2],
        [3],
        [4],
    ]
    cut = plan_batch(forests, 8, fill_tokens=5, cut_tokens=5)
    assert [tree.branches.tolist() for tree in cut.partitioned] == [[0], [3]]
    assert (cut.max_tokens, cut.num_micro_batches) == (5, 2 + 2 + 2)
