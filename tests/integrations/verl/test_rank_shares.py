"""Rows on ranks: the same number on each, groups whole where they fit, and no rank busier than verl's busiest."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integrations.verl.common import num_distinct
from treering.errors import ConfigError, InputError
from treering.integrations.verl.row_groups import dealt_rows, order_rows, share_rows
from treering.integrations.verl.verl_settings import grouping
from treering.tree.forest import Forest


def busiest(rows: list[list[int]], ranks: list[int]) -> int:
    return max(num_distinct([row for row, rank in zip(rows, ranks, strict=True) if rank == r]) for r in set(ranks))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    """Draw rows, the group of each, and a number of ranks that divides the rows."""
    num_ranks, rows_per_rank = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    num_rows = num_ranks * rows_per_rank
    row = st.lists(st.integers(0, 2), min_size=1, max_size=8)
    rows = draw(st.lists(row, min_size=num_rows, max_size=num_rows))
    return rows, draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows)), num_ranks


@given(batch=batches())
def test_ranks_have_equally_many_rows_and_the_busiest_never_more_tokens(
    batch: tuple[list[list[int]], list[int], int],
) -> None:
    rows, groups, num_ranks = batch
    ranks = share_rows(Forest.from_sequences(rows), groups, num_ranks).tolist()
    assert Counter(ranks) == {rank: len(rows) // num_ranks for rank in range(num_ranks)}
    dealt = dealt_rows(len(rows), num_ranks).tolist()
    assert ranks == dealt or busiest(rows, ranks) < busiest(rows, dealt)


@given(num_ranks=st.integers(1, 4), groups_per_rank=st.integers(1, 4), size=st.integers(1, 4), seed=st.integers(0, 99))
def test_groups_of_one_size_that_fill_the_ranks_are_whole(
    num_ranks: int, groups_per_rank: int, size: int, seed: int
) -> None:
    groups = np.repeat(np.arange(num_ranks * groups_per_rank), size)
    groups = np.random.default_rng(seed).permutation(groups)
    rows = [[100 + int(group)] * 20 + [number] for number, group in enumerate(groups)]
    ranks = share_rows(Forest.from_sequences(rows), groups.tolist(), num_ranks)
    assert all(len(set(ranks[groups == group].tolist())) == 1 for group in groups)


def test_a_group_is_split_only_where_no_rank_has_room_for_it() -> None:
    # Three groups of two rows on two ranks of three rows, so one group is on both.
    rows = [[group] * 9 + [10 + row] for row in range(2) for group in range(3)]
    ranks = share_rows(Forest.from_sequences(rows), [0, 1, 2, 0, 1, 2], 2)
    assert sorted(len(set(ranks[group::3].tolist())) for group in range(3)) == [1, 1, 2]


@given(
    num_ranks=st.integers(1, 4),
    groups_each=st.integers(1, 3),
    size=st.integers(1, 4),
    num_mini_batches=st.integers(1, 3),
)
def test_mini_batches_of_all_ranks_have_whole_groups_that_fill_them_and_every_row_once(
    num_ranks: int, groups_each: int, size: int, num_mini_batches: int
) -> None:
    # A mini-batch has `groups_each` groups of `size` rows for each rank.
    num_groups = num_ranks * groups_each * num_mini_batches
    groups = np.random.default_rng(size).permutation(np.repeat(np.arange(num_groups), size))
    by_rank = order_rows(groups.tolist(), num_ranks, num_mini_batches)
    assert sorted(by_rank.ravel().tolist()) == list(range(groups.size))
    mini_batches = np.split(by_rank, num_mini_batches, axis=1)
    held = [set(groups[part].ravel().tolist()) for part in mini_batches]
    assert sum(map(len, held)) == num_groups


def test_groups_come_in_the_order_in_which_their_last_rows_were_done() -> None:
    # Rank 0 got c, a, b and rank 1 got a, c, b: a and c were completed in second place, a on the earlier rank.
    assert order_rows("cabacb", 2, 3).tolist() == [[1, 0, 2], [3, 4, 5]]


def test_rows_that_ranks_cannot_have_equally_many_of_are_refused() -> None:
    with pytest.raises(InputError, match="3 rows cannot be divided equally among 2 ranks"):
        share_rows(Forest.from_sequences([[1], [2], [3]]), "abc", 2)
    with pytest.raises(InputError, match=r"3 rows cannot .* among 2 mini-batches of 3 ranks; give a multiple of 6"):
        order_rows("abc", 3, 2)


def test_where_groups_are_made_whole_is_one_word_and_others_are_refused() -> None:
    assert grouping({}) == "whole"
    assert grouping({"TREERING_VERL_GROUPS": "as_dealt"}) == "as_dealt"
    with pytest.raises(
        ConfigError, match="TREERING_VERL_GROUPS must be whole, whole_mini_batches or as_dealt, got '0'"
    ):
        grouping({"TREERING_VERL_GROUPS": "0"})
