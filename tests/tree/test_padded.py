"""Padded batches become sequences, and results return to the shape of the batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering import Forest
from treering.errors import InputError

batches = st.lists(
    st.tuples(st.lists(st.integers(0, 3), max_size=6), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=5
)


@given(rows=batches)
def test_every_token_of_a_padded_batch_stands_in_the_forest_on_the_path_of_its_row(rows):
    width = max(left + len(tokens) + right for tokens, left, right in rows) or 1
    ids, mask = np.full((2, len(rows), width), 9, np.int64)
    mask[:] = 0
    for row, (tokens, left, _) in enumerate(rows):
        ids[row, left : left + len(tokens)] = tokens
        mask[row, left : left + len(tokens)] = 1
    forest, indices = Forest.from_padded(ids, mask)
    assert ((indices >= 0) == (mask == 1)).all()
    assert forest.tokens[indices[indices >= 0]].tolist() == ids[mask == 1].tolist()
    for row, (tokens, left, _) in enumerate(rows):
        path = indices[row, left : left + len(tokens)]
        assert forest.parent[path].tolist() == [-1, *path.tolist()][: len(tokens)]
    assert forest.num_tokens == len({tuple(tokens[: i + 1]) for tokens, _, _ in rows for i in range(len(tokens))})


def test_restarting_positions_split_a_packed_row():
    forest, indices = Forest.from_padded([[5, 6, 5, 7, 5]], None, [[0, 1, 0, 1, 0]])
    assert forest.num_branches == 3
    assert indices.tolist() == [[0, 1, 0, 2, 0]]


@pytest.mark.parametrize(
    ("ids", "mask", "positions", "rule"),
    [
        ([1, 2], None, None, "a batch .rows, columns., got shape .2,."),
        ([[1.0, 2.0]], None, None, "ids must hold integers, got float64"),
        ([[1, 2]], [[1]], None, "mask must have the shape of ids"),
        ([[1, 2, 3]], [[1, 0, 1]], None, "row 0 has a gap before column 2"),
        ([[1, 2, 3]], None, [[0, 1, 5]], "row 0 has a gap before column 2"),
        ([[1, 2], [3, 4]], None, [[0, 1], [2, 3]], "row 1 begins at 2"),
        ([[2**32 + 1, 2]], None, None, "sequence 0, token 0: id 4294967297 is out of range"),
    ],
)
def test_a_batch_that_has_no_sequences_is_refused(ids, mask, positions, rule):
    with pytest.raises(InputError, match=rule):
        Forest.from_padded(ids, mask, positions)


def test_a_row_after_padding_may_count_its_positions_from_the_padding():
    assert Forest.from_padded([[9, 1, 2], [1, 2, 3]], [[0, 1, 1], [1, 1, 1]], [0, 1, 2])[0].num_tokens == 3
