"""Data-parallel shares: every forest once, balanced by cost."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.forests import sequence_sets
from treering.errors import InputError
from treering.tree.forest import Forest
from treering.tree.plan.costs import CostModel
from treering.tree.plan.ranks import share_among_ranks

COSTS = CostModel(token_s=1.0, pair_s=0.5, segment_s=3.0)


def chains(*lengths: int) -> list[Forest]:
    return [Forest.from_sequences([[1] * length]) for length in lengths]


@given(st.lists(sequence_sets(), max_size=6), st.integers(1, 4), st.sampled_from([None, COSTS]))
def test_every_forest_is_of_one_rank(sets: list[list[list[int]]], num_ranks: int, costs: CostModel | None) -> None:
    forests = [Forest.from_sequences(sequences) for sequences in sets]
    shares = share_among_ranks(forests, num_ranks, costs)
    assert len(shares) == num_ranks
    assert sorted(number for share in shares for number in share.forests.tolist()) == list(range(len(forests)))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_the_largest_load_is_within_four_thirds_of_the_smallest_possible(lengths: list[int], num_ranks: int) -> None:
    shares = share_among_ranks(chains(*lengths), num_ranks)
    loads = [sum(lengths[i] for i in share.forests) for share in shares]
    assert [share.cost for share in shares] == loads
    best = min(
        max(sum(length for length, rank in zip(lengths, ranks, strict=True) if rank == r) for r in range(num_ranks))
        for ranks in itertools.product(range(num_ranks), repeat=len(lengths))
    )
    assert max(loads) <= 4 / 3 * best


def test_the_costliest_goes_first_to_the_least_loaded() -> None:
    assert [share.forests.tolist() for share in share_among_ranks(chains(5, 4, 3, 3), 2)] == [[0, 3], [1, 2]]


def test_costs_decide_and_not_tokens() -> None:
    # Four chains of 4 have 40 pairs, one of 16 has 136: by tokens they are even, by pairs they are not.
    forests = chains(16, 4, 4, 4, 4)
    by_pairs = CostModel(token_s=0.0, pair_s=1.0, segment_s=0.0)
    assert [share.forests.size for share in share_among_ranks(forests, 2)] == [1, 4]
    assert [share.cost for share in share_among_ranks(forests, 2, costs=by_pairs)] == [136.0, 40.0]
    # A tree that is planned as chains costs what its chains cost.
    lossy = CostModel(token_s=0.0, pair_s=0.0, segment_s=1.0)
    [share] = share_among_ranks([Forest.from_sequences([[5, 6, 7], [5, 6, 8]])], 1, costs=lossy)
    assert share.cost == 2.0


def test_no_rank_is_refused() -> None:
    with pytest.raises(InputError, match="num_ranks must be an integer of at least 1, got 0"):
        share_among_ranks([], 0)
