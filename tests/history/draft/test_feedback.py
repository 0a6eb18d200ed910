"""The outcome of each drafted token: from leaves, from counts where a draft is a chain, and after cutoffs."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.history.draft.feedback import mark
from treering.history.features import ACCEPTED, NOT_TRIED, REFUSED
from treering.history.match.running_rows import RowStates

UNKNOWN = -2


def marked(
    drafts: Sequence[Sequence[int]], accepted: Sequence[int], leaves: Sequence[int], was_cut: Sequence[bool]
) -> tuple[list[list[int]], list[int]]:
    """For each row, given by its parents, what became of its tokens and of its draft; 9 where nothing is written."""
    offsets, num = np.cumsum([0, *map(len, drafts)]), len(drafts)
    was_accepted, states = np.full(offsets[-1], 9, np.int8), RowStates(*np.full((3, num), 9, np.int64))
    parents = np.array([parent for row in drafts for parent in row], np.int32)
    mark(
        offsets, parents, np.array(accepted, np.int64), np.array(leaves, np.int64), False, np.array(was_cut, np.bool_),
        was_accepted, states, np.arange(num),
    )  # fmt: skip
    # A context of 9 tokens has the accepted ones then, and the one sampled after them.
    expected = [9 + count + 1 if row else 9 for row, count in zip(drafts, accepted, strict=True)]
    assert states.num_expected.tolist() == expected
    return [was_accepted[a:b].tolist() for a, b in pairwise(offsets)], states.state.tolist()


CHAIN = [-1, 0, 1]
TREE = [-1, 0, 1, 0, -1, 4]
"""0 and 4 behind the context; 1 and 3 behind 0; 2 behind 1; 5 behind 4."""


@pytest.mark.parametrize("was_cut", [False, True])
@pytest.mark.parametrize("accepted", range(4))
def test_a_chain_needs_no_leaf(accepted: int, was_cut: bool) -> None:
    assert marked([CHAIN], [accepted], [UNKNOWN], [was_cut]) == marked([CHAIN], [accepted], [accepted - 1], [was_cut])


@pytest.mark.parametrize(
    ("parents", "accepted", "expected", "state"),
    [
        # None accepted: no choice is open.
        (TREE, 0, [0, -1, -1, -1, 0, -1], REFUSED),
        # Which of 0 and 4 was accepted is not known, and nothing below either.
        (TREE, 1, [-1, -1, -1, -1, -1, -1], NOT_TRIED),
        (TREE, 2, [-1, -1, -1, -1, -1, -1], NOT_TRIED),
        # A trunk of two tokens before it branches.
        ([-1, 0, 1, 1], 1, [1, 0, -1, -1], REFUSED),
        ([-1, 0, 1, 1], 2, [1, 1, 0, 0], REFUSED),
        ([-1, 0, 1, 1], 3, [1, 1, -1, -1], NOT_TRIED),
    ],
)
def test_without_a_leaf_a_tree_tells_as_much_as_it_leaves_no_choice(
    parents: list[int], accepted: int, expected: list[int], state: int
) -> None:
    assert marked([parents], [accepted], [UNKNOWN], [False]) == ([expected], [state])


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
    found, states = marked([row[0] for row in rows], depths, [row[1] for row in rows], [row[2] for row in rows])
    assert found == expected
    for state, (parents, leaf, was_cut) in zip(states, rows, strict=True):
        tried = REFUSED if leaf in parents else ACCEPTED
        assert state == (9 if not parents else NOT_TRIED if was_cut else tried)
