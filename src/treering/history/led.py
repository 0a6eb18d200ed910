"""Rows with the same tokens as another one: they are looked up once, and verified along that row's draft.

Knows leaders and drafts. Knows nothing of how equal rows are found, and of what becomes of drafts.

    B rows   D drafted tokens   A answers: for each row, the tokens of the draft that it was verified along
"""

import numpy as np
from numpy.typing import NDArray

from treering.history.records import DraftRows, Drafts

Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]


def leaders_of(rows: DraftRows) -> Int64Array:
    """The leader of each row, int64 [B]; read in place."""
    return np.arange(len(rows.prompt_ids)) if rows.leaders is None else rows.leaders


def worth_of(rows: DraftRows) -> Float64Array:
    """What a token of each row's draft is worth to all rows that are verified along it, float64 [B]; 0 of led rows.

    Example: with leaders [0, 0, 2] and nothing said of worth it is [2, 0, 1].
    """
    num_rows = len(rows.prompt_ids)
    worth = np.ones(num_rows) if rows.worth is None else rows.worth
    if rows.leaders is None:
        return worth
    # Leaders that are none are told by the compiled call.
    shared = np.zeros(num_rows)
    np.add.at(shared, np.clip(rows.leaders, 0, num_rows - 1), worth)
    return shared


def repeat(drafts: Drafts, leaders: Int64Array) -> tuple[Drafts, Int64Array]:
    """Every row with the draft that it was verified along, and where each of its tokens stands in `drafts`, int64 [A].

    Example: drafts of 2, 0 and 1 tokens with leaders [0, 0, 2] become drafts of 2, 2 and 1, from 0, 1, 0, 1 and 2.
    """
    begins = drafts.offsets[leaders]
    sizes = drafts.offsets[leaders + 1] - begins
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    places = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], sizes)
    repeated = Drafts(
        tokens=drafts.tokens[places],
        offsets=offsets,
        parents=drafts.parents[places],
        acceptance=drafts.acceptance[places],
    )
    return repeated, places
