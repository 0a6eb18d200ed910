"""Rows with the same tokens as an earlier row, their leader: they are drafted once and verified with its draft.

B rows   D drafted tokens   A for each row, the tokens of the draft that it was verified with
"""

import numpy as np

from treering.arrays import Float32Array, Float64Array, Int32Array, Int64Array
from treering.history.types import DraftRows, Drafts
from treering.lean import kernel


def read_leaders(rows: DraftRows) -> tuple[Int64Array, Float64Array, int]:
    """The leader of each row, and what a token of each row's draft is worth to all rows that are verified with it.

    Returns:
        int64 [B], read in place; float64 [B], 0 for duplicate rows; and how many rows are their own leaders.

    Example: with leaders [0, 0, 2] and no worth given, the worth is [2, 0, 1] and two rows are their own leaders.
    """
    num_rows = len(rows.prompt_ids)
    worth = np.ones(num_rows) if rows.worth is None else rows.worth
    if rows.leaders is None:
        return np.arange(num_rows), worth, num_rows
    shared = np.zeros(num_rows)
    num_leading: int = add_worth(rows.leaders, worth, shared)
    return rows.leaders, shared, num_leading


def most_worth(rows: DraftRows, num_leading: int) -> float:
    """The greatest worth that `read_leaders` can give a row, however duplicates are spread over the leaders.

    Example: of 8 rows of which 5 are leaders, none is worth more than 4.
    """
    own = 1.0 if rows.worth is None else max(rows.worth.tolist(), default=1.0)
    return own * (1 + len(rows.prompt_ids) - num_leading)


@kernel
def add_worth(leaders: Int64Array, worth: Float64Array, shared: Float64Array) -> int:
    """Adds what each row is worth to its leader, in `shared` [B]; returns how many rows are leaders."""
    num_leading = 0
    for row in range(leaders.size):
        # The compiled draft call reports a leader out of range.
        leader = min(max(leaders[row], 0), leaders.size - 1)
        shared[leader] += worth[row]
        num_leading += leader == row
    return num_leading


def repeat(drafts: Drafts, leaders: Int64Array) -> tuple[Drafts, Int64Array]:
    """Every row with the draft that it was verified with, and the index of each of its tokens in `drafts`, int64 [A].

    Example: drafts of 2, 0 and 1 tokens with leaders [0, 0, 2] become drafts of 2, 2 and 1, from 0, 1, 0, 1 and 2.
    """
    offsets = np.zeros(leaders.size + 1, np.int64)
    size: int = _add_up(drafts.offsets, leaders, offsets)
    tokens, parents, acceptance = np.empty(size, np.int32), np.empty(size, np.int32), np.empty(size, np.float32)
    origins = np.empty(size, np.int64)
    _repeat(
        drafts.offsets, leaders, drafts.tokens, drafts.parents, drafts.acceptance, tokens, parents, acceptance, origins
    )
    return Drafts(tokens=tokens, offsets=offsets, parents=parents, acceptance=acceptance), origins


@kernel
def _add_up(offsets: Int64Array, leaders: Int64Array, sums: Int64Array) -> int:
    """Writes where each row's draft ends to `sums[1:]`; returns where the last one ends."""
    total = 0
    for row in range(leaders.size):
        total += offsets[leaders[row] + 1] - offsets[leaders[row]]
        sums[row + 1] = total
    return total


@kernel
def _repeat(
    offsets: Int64Array,
    leaders: Int64Array,
    tokens: Int32Array,
    parents: Int32Array,
    acceptance: Float32Array,
    tokens_out: Int32Array,
    parents_out: Int32Array,
    acceptance_out: Float32Array,
    origins: Int64Array,
) -> None:
    """Writes the rows' drafts one after another, and the origin of each token."""
    at = 0
    for row in range(leaders.size):
        for i in range(offsets[leaders[row]], offsets[leaders[row] + 1]):
            tokens_out[at], parents_out[at], acceptance_out[at], origins[at] = tokens[i], parents[i], acceptance[i], i
            at += 1
