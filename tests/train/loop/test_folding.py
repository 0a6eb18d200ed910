"""Folding: a renumbering by frequency that fits any vocabulary."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.errors import InputError
from treering.train.loop.batches import fold_ids

SETS = st.lists(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 12), min_size=1, max_size=15), max_size=6)


def arrays(sequences: list[list[int]]) -> list[np.ndarray]:
    return [np.array(sequence, np.int32) for sequence in sequences]


def test_frequent_ids_come_first_and_rare_ones_share() -> None:
    assert [part.tolist() for part in fold_ids(arrays([[7, 9], [9, 5]]))] == [[2, 0], [0, 1]]
    assert [part.tolist() for part in fold_ids(arrays([[7, 9], [9, 5]]), 2)] == [[1, 0], [0, 1]]
    # Twenty ids, each as often as its number says, into 16: 14 of their own, the rest share 14 and 15 in turn.
    [folded] = fold_ids(arrays([[i for i in range(1, 21) for _ in range(i)]]), 16)
    assert folded[-20:].tolist() == [0] * 20
    assert folded[:21].tolist() == [15] + [14] * 2 + [15] * 3 + [14] * 4 + [15] * 5 + [14] * 6


@given(SETS)
def test_without_a_limit_folding_is_one_to_one_and_keeps_frequencies_in_order(sequences: list[list[int]]) -> None:
    folded = [part.tolist() for part in fold_ids(arrays(sequences))]
    pairs = set(zip(chain(*sequences), chain(*folded), strict=True))
    assert len({old for old, _ in pairs}) == len({new for _, new in pairs}) == len(pairs)
    counts = Counter(chain(*folded))
    assert sorted(counts) == list(range(len(counts)))
    assert [counts[i] for i in range(len(counts))] == sorted(counts.values(), reverse=True)


@given(SETS, st.integers(1, 10))
def test_with_a_limit_every_id_fits_and_lengths_stay(sequences: list[list[int]], vocab_size: int) -> None:
    folded = fold_ids(arrays(sequences), vocab_size)
    assert [part.size for part in folded] == [len(sequence) for sequence in sequences]
    assert all(part.dtype == np.int32 and part.min() >= 0 and part.max() < vocab_size for part in folded)


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match="got vocab_size=0"):
        fold_ids(arrays([[1]]), 0)
