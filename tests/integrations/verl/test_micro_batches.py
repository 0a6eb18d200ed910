"""Micro-batches by distinct tokens: within their budget, with rows of a prompt together, and every row once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integrations.verl.common import num_distinct
from treering.errors import InputError
from treering.integrations.verl.row_groups import plan_rows, split_rows
from treering.tree.forest import Forest

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


@given(rows=ROWS, max_tokens=st.integers(8, 30), data=st.data())
def test_micro_batches_hold_every_row_once_within_their_distinct_tokens(
    rows: list[list[int]], max_tokens: int, data: st.DataObject
) -> None:
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    planned = plan_rows(Forest.from_sequences(rows), groups, max_tokens=max_tokens)
    assert sorted(row for part in planned for row in part) == list(range(len(rows)))
    assert all(num_distinct([rows[i] for i in part]) <= max_tokens for part in planned)
    for group in set(groups):
        members = [i for i, own in enumerate(groups) if own == group]
        if num_distinct([rows[i] for i in members]) <= max_tokens:
            assert sum(any(i in part for i in members) for part in planned) == 1


@given(rows=ROWS, max_rows=st.integers(1, 5))
def test_micro_batches_hold_at_most_their_rows(rows: list[list[int]], max_rows: int) -> None:
    planned = plan_rows(Forest.from_sequences(rows), [0] * len(rows), max_rows=max_rows)
    assert sorted(row for part in planned for row in part) == list(range(len(rows)))
    assert all(1 <= len(part) <= max_rows for part in planned)


@given(parts=st.lists(st.integers(1, 5), min_size=1, max_size=4), more=st.integers(0, 6))
def test_splitting_keeps_every_row_and_gives_the_wanted_number(parts: list[int], more: int) -> None:
    numbers = iter(range(sum(parts)))
    planned = [[next(numbers) for _ in range(size)] for size in parts]
    num_wanted = min(len(parts) + more, sum(parts))
    split = split_rows(planned, num_wanted)
    assert len(split) == num_wanted
    assert all(split)
    assert [row for part in split for row in part] == list(range(sum(parts)))


def test_a_row_longer_than_the_budget_is_refused_with_verls_setting() -> None:
    with pytest.raises(InputError, match=r"a row has 3 tokens, but a micro-batch holds 2: raise verl's ppo_max_token"):
        plan_rows(Forest.from_sequences([[1, 2, 3]]), [0], max_tokens=2)


def test_fewer_rows_than_micro_batches_of_another_rank_are_refused() -> None:
    with pytest.raises(InputError, match="another rank runs 3 micro-batches, but this one has 2 rows"):
        split_rows([[0, 1]], 3)
