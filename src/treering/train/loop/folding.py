"""Fold vocabularies: renumber token ids by frequency, so that a tiny random model has no rows for unused ids.

The tokenizer cannot decode folded ids.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError
from treering.types import TokenIds

SHARED_FRACTION = 8
"""Ids that do not fit share the last 1/8 of the range."""


def fold_ids(sequences: Sequence[TokenIds], vocab_size: int | None = None) -> list[TokenIds]:
    """Renumbers the ids that occur: the most frequent one becomes 0; of equally frequent ones the smaller id is first.

    Args:
        sequences: int32 [T] each, T >= 1.
        vocab_size: size of the new range; None for the number of distinct ids. If ids do not fit, those ranked in or
            beyond the last eighth of the range share that eighth, by the remainder of their rank.

    Returns:
        int32 arrays of the same shapes, all ids in [0, vocab_size).

    Raises:
        InputError: a vocab_size below 1.

    Example: [7, 9, 9, 5] folds to [2, 0, 0, 1]; with vocab_size=2 ids 7 and 5 share 1: [1, 0, 0, 1].
    """
    if vocab_size is not None and vocab_size < 1:
        raise InputError(f"a vocabulary has at least one id, got vocab_size={vocab_size}; raise it")
    if not sequences:
        return []
    # Sequence by sequence, so that memory holds the folded ids and little more.
    found = [np.unique(sequence, return_counts=True) for sequence in sequences]
    ids, places = np.unique(np.concatenate([each for each, _ in found]), return_inverse=True)
    counts = np.zeros(ids.size, np.int64)
    np.add.at(counts, places.reshape(-1), np.concatenate([times for _, times in found]))
    rank = np.empty(ids.size, np.int64)
    rank[np.lexsort((ids, -counts))] = np.arange(ids.size)
    folded = _shared(rank, ids.size if vocab_size is None else vocab_size).astype(np.int32)
    return [folded[np.searchsorted(ids, sequence)] for sequence in sequences]


def _shared(rank: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    if rank.size <= vocab_size:
        return rank
    num_shared = max(1, vocab_size // SHARED_FRACTION)
    num_own = vocab_size - num_shared
    return np.where(rank < num_own, rank, num_own + (rank - num_own) % num_shared)
