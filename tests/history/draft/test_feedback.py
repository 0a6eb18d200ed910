"""The outcome of each drafted token: from leaves, from counts where a draft is a chain, and after cutoffs."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.history.draft.feedback import mark

UNKNOWN = -2


def marked(
    drafts: Sequence[Sequence[int]], accepted: Sequence[int], leaves: Sequence[int], was_cut: Sequence[bool]
) -> tuple[list[list[int]], list[int]]:
    """For each row, given by its parents, what became of its tokens; how many stood behind the last accepted one."""
    offsets = np.cumsum([0, *map(len, drafts)])
    was_accepted, num_left = np.full(offsets[-1], 9, np.int8), np.full(len(drafts), 9, np.int64)
    parents = np.array([parent for row in drafts for parent in row], np.int32)
    mark(
        offsets, parents, np.array(accepted, np.int64), np.array(leaves, np.int64), np.array(was_cut, np.bool_),
        was_accepted, num_left,
    )  # fmt: skip
    return [was_accepted[a:b].tolist() for a, b in pairwise(offsets)], num_left.tolist()


CHAIN = [-1, 0, 1]
TREE = [-1, 0, 1, 0, -1, 4]
"""0 and 4 behind the context; 1 and 3 behind 0; 2 behind 1; 5 behind 4."""


@pytest.mark.parametrize(
    ("parents", "accepted", "leaf", "expected", "num_left"),
    [
        (CHAIN, 0, -1, [0, -1, -1], 1),
        (CHAIN, 2, 1, [1, 1, 0], 1),
        (CHAIN, 3, 2, [1, 1, 1], 0),
        ([], 0, -1, [], 0),
        (TREE, 0, -1, [0, -1, -1, -1, 0, -1], 2),
        (TREE, 1, 0, [1, 0, -1, 0, 0, -1], 2),
        (TREE, 2, 1, [1, 1, 0, 0, 0, -1], 1),
        (TREE, 3, 2, [1, 1, 1, 0, 0, -1], 0),
        (TREE, 2, 3, [1, 0, -1, 1, 0, -1], 0),
        (TREE, 2, 5, [0, -1, -1, -1, 1, 1], 0),
    ],
)
def test_with_a_leaf_every_token_behind_an_accepted_one_was_tried(
    parents: list[int], accepted: int, leaf: int, expected: list[int], num_left: int
) -> None:
    assert marked([parents], [accepted], [leaf], [False]) == ([expected], [num_left])


@pytest.mark.parametrize(
    ("parents", "accepted", "leaf", "expected"),
    [
        (CHAIN, 1, 0, [1, -1, -1]),
        (CHAIN, 0, -1, [-1, -1, -1]),
        (CHAIN, 3, 2, [1, 1, 1]),
        # Cut off behind 0: that 4 was not taken is known, what comes behind 0 is not.
        (TREE, 1, 0, [1, -1, -1, -1, 0, -1]),
        (TREE, 2, 5, [0, -1, -1, -1, 1, 1]),
    ],
)
def test_a_cut_off_row_did_not_try_what_stands_behind_its_last_token(
    parents: list[int], accepted: int, leaf: int, expected: list[int]
) -> None:
    assert marked([parents], [accepted], [leaf], [True])[0] == [expected]


@pytest.mark.parametrize("was_cut", [False, True])
@pytest.mark.parametrize("accepted", range(4))
def test_a_chain_needs_no_leaf(accepted: int, was_cut: bool) -> None:
    assert marked([CHAIN], [accepted], [UNKNOWN], [was_cut]) == marked([CHAIN], [accepted], [accepted - 1], [was_cut])


@pytest.mark.parametrize(
    ("parents", "accepted", "expected", "num_left"),
    [
        # None accepted: no choice is open.
        (TREE, 0, [0, -1, -1, -1, 0, -1], 2),
        # Which of 0 and 4 was accepted is not known, and nothing below either.
        (TREE, 1, [-1, -1, -1, -1, -1, -1], -1),
        (TREE, 2, [-1, -1, -1, -1, -1, -1], -1),
        # A trunk of two tokens before it branches.
        ([-1, 0, 1, 1], 1, [1, 0, -1, -1], 1),
        ([-1, 0, 1, 1], 2, [1, 1, 0, 0], 2),
        ([-1, 0, 1, 1], 3, [1, 1, -1, -1], -1),
    ],
)
def test_without_a_leaf_a_tree_tells_as_much_as_it_leaves_no_choice(
    parents: list[int], accepted: int, expected: list[int], num_left: int
) -> None:
    assert marked([parents], [accepted], [UNKNOWN], [False]) == ([expected], [num_left])


PARENTS = st.integers(0, 12).flatmap(lambda size: st.tuples(*(st.integers(-1, i - 1) for i in range(size))).map(list))


@given(st.lists(st.tuples(PARENTS, st.integers(-1, 11), st.booleans()), max_size=5))
def test_rows_are_marked_by_their_paths(rows: list[tuple[list[int], int, bool]]) -> None:
    rows = [(parents, min(leaf, len(parents) - 1), was_cut) for parents, leaf, was_cut in rows]
    expected, depths = [], []
    for parents, leaf, was_cut in rows:
        path, index = set(), leaf
        while index >= 0:
            path.add(index)
            index = parents[index]
        tried = {i for i, parent in enumerate(parents) if parent in path or parent == -1}
        if was_cut:
            tried -= {i for i, parent in enumerate(parents) if parent == leaf}
        expected.append([1 if i in path else 0 if i in tried else -1 for i in range(len(parents))])
        depths.append(len(path))
    found, num_left = marked([row[0] for row in rows], depths, [row[1] for row in rows], [row[2] for row in rows])
    assert found == expected
    assert num_left == [parents.count(leaf) for parents, leaf, _ in rows]
