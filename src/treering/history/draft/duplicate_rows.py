"""Rows with the same tokens as another one: they are looked up once, and verified along that row's draft.

Knows leaders and drafts. Knows nothing of how equal rows are found, and of what becomes of drafts.

    B rows   D drafted tokens   A answers: for each row, the tokens of the draft that it was verified along
"""

import numpy as np
from numba import njit

from treering.arrays import Float32Array, Float64Array, Int32Array, Int64Array
from treering.history.types import DraftRows, Drafts


def read_leaders(rows: DraftRows) -> tuple[Int64Array, Float64Array, int]:
    """Who leads each row, and what a token of each row's draft is worth to all that are verified along it.

    Returns:
        int64 [B], read in place; float64 [B], 0 for led rows; and how many rows lead themselves.

    Example: with leaders [0, 0, 2] and nothing said of worth that is [2, 0, 1], and two rows.
    """
    num_rows = len(rows.prompt_ids)
    worth = np.ones(num_rows) if rows.worth is None else rows.worth
    if rows.leaders is None:
        return np.arange(num_rows), worth, num_rows
    shared = np.zeros(num_rows)
    num_leading: int = add_worth(rows.leaders, worth, shared)
    return rows.leaders, shared, num_leading


def most_worth(rows: DraftRows, num_leading: int) -> float:
    """The most that `read_leaders` may give a row, however the led ones are spread over so many leaders.

    Example: 8 rows of which 5 lead themselves are worth 4 at most.
    """
    own = 1.0 if rows.worth is None else max(rows.worth.tolist(), default=1.0)
    return own * (1 + len(rows.prompt_ids) - num_leading)


@njit(cache=True)
def add_worth(leaders: Int64Array, worth: Float64Array, shared: Float64Array) -> int:
    """Adds what each row is worth to its leader, in `shared` [B]; returns how many rows lead themselves."""
    num_leading = 0
    for row in range(leaders.size):
        # A leader that is none is told by the call that drafts.
        leader = min(max(leaders[row], 0), leaders.size - 1)
        shared[leader] += worth[row]
        num_leading += leader == row
    return num_leading


def repeat(drafts: Drafts, leaders: Int64Array) -> tuple[Drafts, Int64Array]:
    """Every row with the draft that it was verified along, and where each of its tokens stands in `drafts`, int64 [A].

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


@njit(cache=True, nogil=True)
def _add_up(offsets: Int64Array, leaders: Int64Array, sums: Int64Array) -> int:
    """Writes where each row's draft ends, to `sums` behind its first; returns where the last one does."""
    total = 0
    for row in range(leaders.size):
        total += offsets[leaders[row] + 1] - offsets[leaders[row]]
        sums[row + 1] = total
    return total


@njit(cache=True, nogil=True)
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
    """Writes each row's draft behind that of the row before, and where each token came from."""
    at = 0
    for row in range(leaders.size):
        for i in range(offsets[leaders[row]], offsets[leaders[row] + 1]):
            tokens_out[at], parents_out[at], acceptance_out[at], origins[at] = tokens[i], parents[i], acceptance[i], i
            at += 1
