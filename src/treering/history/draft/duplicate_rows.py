"""Rows with the same tokens as an earlier row, their leader: they are drafted once and verified with its draft.

B rows   D drafted tokens   A for each row, the tokens of the draft that it was verified with
"""

import numpy as np

from treering.arrays import Float64Array, Int64Array
from treering.history.types import DraftRows, Drafts


def read_leaders(rows: DraftRows) -> tuple[Int64Array, Float64Array, int]:
    """The leader of each row, and how many rows are verified with each row's draft, which is what its tokens are worth.

    Returns:
        int64 [B], read in place; float64 [B], 0 for duplicate rows; and how many rows are their own leaders.

    Example: with leaders [0, 0, 2] the worth is [2, 0, 1] and two rows are their own leaders.
    """
    num_rows = len(rows.prompt_ids)
    if rows.leaders is None:
        return np.arange(num_rows), np.ones(num_rows), num_rows
    # The compiled draft call reports a leader out of range.
    worth = np.bincount(rows.leaders % max(num_rows, 1), minlength=num_rows).astype(np.float64)
    return rows.leaders, worth, int(np.count_nonzero(worth))


def repeat(drafts: Drafts, leaders: Int64Array) -> tuple[Drafts, Int64Array]:
    """Every row with the draft that it was verified with, and the index of each of its tokens in `drafts`, int64 [A].

    Example: drafts of 2, 0 and 1 tokens with leaders [0, 0, 2] become drafts of 2, 2 and 1, from 0, 1, 0, 1 and 2.
    """
    sizes = (drafts.offsets[1:] - drafts.offsets[:-1])[leaders]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    origins = np.arange(offsets[-1]) + np.repeat(drafts.offsets[leaders] - offsets[:-1], sizes)
    repeated = Drafts(
        tokens=drafts.tokens[origins],
        offsets=offsets,
        parents=drafts.parents[origins],
        acceptance=drafts.acceptance[origins],
    )
    return repeated, origins
