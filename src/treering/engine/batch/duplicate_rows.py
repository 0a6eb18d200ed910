"""Running rows with the same tokens, as siblings have them until their draws differ: a pass computes such rows once.

Knows the columns. Knows nothing of passes, drafts and memory. Tokens that are the same at the same places have the same
keys, values and logits; each row still draws from these with noise of its own, so no rollout notices (law 5).

    B rows
"""

from typing import Literal

import numpy as np
from numba import njit

from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.engine.batch.state import BatchState

EqualRows = Literal["auto", "once", "each"]
"""once: rows with the same tokens are computed once. each: every row for itself. auto: once on CPU, where a token more
takes its time in every pass, and each elsewhere."""


def leaders_of(columns: BatchState, num_rows: int, equal_rows: Literal["once", "each"]) -> Int64Array:
    """For each row the first one with the same tokens, int64 [B]; itself where there is none, or where each counts.

    Rows are the same that lack their last token alone, behind a prompt that they share in the arena.

    Example: of rows with 5 6 7, 5 6 8 and 5 6 7 behind one prompt the leaders are 0, 1 and 0.
    """
    leaders = np.arange(num_rows)
    if equal_rows == "once" and num_rows > 1:
        c = columns
        _fill_leaders(c.tokens, c.num_tokens, c.num_computed, c.num_prefix, c.prefix_start, c.is_ready, leaders)
    return leaders


def resolved(equal_rows: EqualRows, device: str) -> Literal["once", "each"]:
    """What "auto" means on a device."""
    if equal_rows == "auto":
        return "once" if device == "cpu" else "each"
    return equal_rows


@njit(cache=True, nogil=True)
def _fill_leaders(
    tokens: Int32Array,
    num_tokens: Int64Array,
    num_computed: Int64Array,
    num_prefix: Int64Array,
    prefix_start: Int64Array,
    is_ready: BoolArray,
    leaders: Int64Array,
) -> None:
    """Writes the leader of each row over its own number."""
    for row in range(1, leaders.size):
        size, first = num_tokens[row], num_prefix[row]
        if not is_ready[row] or size - num_computed[row] != 1:
            continue
        for other in range(row):
            is_alike = num_tokens[other] == size and num_computed[other] == size - 1 and is_ready[other]
            is_beside = num_prefix[other] == first and prefix_start[other] == prefix_start[row]
            if not is_alike or not is_beside:
                continue
            # From the newest on: rows that have parted mostly differ there.
            at = size - 1
            while at >= first and tokens[row, at] == tokens[other, at]:
                at -= 1
            if at < first:
                leaders[row] = other
                break
