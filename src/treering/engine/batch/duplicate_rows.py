"""Finds duplicate rows: running rows with identical tokens, such as siblings before their first difference.

Identical contexts have identical keys, values and logits, so a pass computes them once. Each row still samples with its
own noise, so results do not change (law 5).

    B rows
"""

from typing import Literal

import numpy as np

from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.compiling.lean import kernel
from treering.engine.batch.state import BatchState

DuplicateRows = Literal["auto", "once", "each"]
"""once: duplicate rows are computed once. each: every row is computed. auto: once on CPU, where every token costs time,
and each elsewhere."""


def leaders_of(columns: BatchState, num_rows: int, duplicate_rows: Literal["once", "each"]) -> Int64Array:
    """The first row with the same tokens as each row, int64 [B]; the row itself if there is none, or with "each".

    Only rows that have all but their last token computed and share their prompt in the arena can be duplicates.

    Example: rows 5 6 7, 5 6 8 and 5 6 7 after one prompt have the leaders 0, 1 and 0.
    """
    leaders = np.arange(num_rows)
    if duplicate_rows == "once" and num_rows > 1:
        c = columns
        _fill_leaders(c.tokens, c.num_tokens, c.num_computed, c.num_prefix, c.prefix_start, c.is_ready, leaders)
    return leaders


def resolve(duplicate_rows: DuplicateRows, device: str) -> Literal["once", "each"]:
    """Resolves "auto" for a device."""
    if duplicate_rows == "auto":
        return "once" if device == "cpu" else "each"
    return duplicate_rows


@kernel
def _fill_leaders(
    tokens: Int32Array,
    num_tokens: Int64Array,
    num_computed: Int64Array,
    num_prefix: Int64Array,
    prefix_start: Int64Array,
    is_ready: BoolArray,
    leaders: Int64Array,
) -> None:
    """Overwrites each row's index in `leaders` with its leader."""
    for row in range(1, leaders.size):
        size, first = num_tokens[row], num_prefix[row]
        if not is_ready[row] or size - num_computed[row] != 1:
            continue
        for other in range(row):
            is_alike = num_tokens[other] == size and num_computed[other] == size - 1 and is_ready[other]
            is_beside = num_prefix[other] == first and prefix_start[other] == prefix_start[row]
            if not is_alike or not is_beside:
                continue
            # Newest tokens first: rows that differ mostly differ there.
            at = size - 1
            while at >= first and tokens[row, at] == tokens[other, at]:
                at -= 1
            if at < first:
                leaders[row] = other
                break
