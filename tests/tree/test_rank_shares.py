"""Data-parallel shares: every forest once, balanced by cost."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.forests import sequence_sets
from treering.errors import InputError
from treering.tree.forest import Forest
from treering.tree.plan import share_among_ranks


def chains(*lengths: int) -> list[Forest]:
    return [Forest.from_sequences([[1] * length]) for length in lengths]


@given(st.lists(sequence_sets(), max_size=6), st.integers(1, 4))
def test_every_forest_is_of_one_rank(sets: list[list[list[int]]], num_ranks: int) -> None:
    forests = [Forest.from_sequences(sequences) for sequences in sets]
    shares = share_among_ranks(forests, num_ranks)
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


def test_no_rank_is_refused() -> None:
    with pytest.raises(InputError, match="num_ranks must be an integer of at least 1, got 0"):
        share_among_ranks([], 0)
