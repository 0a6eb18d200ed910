"""Where the end of a row's context occurs in running rows: those of its siblings, or its own.

Knows rows of tokens. Knows nothing of acceptance. Rows are read from their newest end, as they stand: nothing is kept
from one step to the next.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

MAX_PLACES = 32
"""Occurrences that are followed, the newest ones."""
_BLOCK = 64


@njit(inline="always")
def _match_back(row: Int32Array, at: int, row_start: int, context: Int32Array, start: int, max_match: int) -> int:
    """How many tokens up to row[at] equal the context's last ones; a beginning that both reach counts as one more."""
    limit = min(max_match, at - row_start + 1, context.size - start)
    length = 0
    while length < limit and row[at - length] == context[context.size - 1 - length]:
        length += 1
    if length < max_match and length == at - row_start + 1 and length == context.size - start:
        length += 1
    return length


@njit(inline="always")
def _has(block: Int32Array, token: np.int32) -> bool:
    """Whether a token stands in a block; counts in 32 bits and never leaves early, so that it compiles to vectors."""
    count = np.uint32(0)
    for i in range(block.size):
        count |= np.uint32(block[i] == token)
    return bool(count != 0)


@njit
def longest_in_row(
    row: Int32Array,
    row_start: int,
    context: Int32Array,
    start: int,
    max_match: int,
    max_window: int,
    number: int,
    best: int,
    num_places: int,
    places: Int64Array,
) -> tuple[int, int]:
    """Looks for the context's end in a row; returns the longest match so far and how many places have it.

    Args:
        row: int32 [m], the row's valid tokens; the last one is only followed to, never from.
        row_start: where its matches may begin; a marker stands before it.
        context: int32 [n], whose end is looked for.
        start: where the pattern may begin; a marker stands before it.
        max_match: of the pattern, marker included.
        max_window: how many places are looked at, from the newest on.
        number: the row's own, noted with each place.
        best: longest match in the rows before, 0 where there is none.
        num_places: places that have it.
        places: int64 [MAX_PLACES, 2], (row, place of the token behind the match), written from `num_places` on.
    """
    if context.size == start:
        # Nothing but the marker to look for, and it stands in one place.
        if row.size == row_start or num_places == MAX_PLACES:
            return best, num_places
        places[num_places, 0], places[num_places, 1] = number, row_start
        return 1, num_places + 1
    lowest = max(row_start, row.size - 1 - max_window)
    token = context[context.size - 1]
    high = row.size - 1
    while high > lowest:
        low = max(lowest, high - _BLOCK)
        if _has(row[low:high], token):
            for at in range(high - 1, low - 1, -1):
                if row[at] != token:
                    continue
                length = _match_back(row, at, row_start, context, start, max_match)
                if length > best:
                    best, num_places = length, 0
                if length == best and num_places < MAX_PLACES:
                    places[num_places, 0], places[num_places, 1] = number, at + 1
                    num_places += 1
            if best == max_match and num_places == MAX_PLACES:
                return best, num_places
        high = low
    return best, num_places


@njit
def follow(tokens: Int32Array, num_tokens: Int64Array, places: Int64Array, num_places: int) -> tuple[int, int, int]:
    """Moves the places of running rows on by their most frequent token; of equals, the newest one.

    Returns (token, votes, places left); left are those that have the token and another one behind it, now at that one.
    """
    token, votes = -1, 0
    for i in range(num_places):
        candidate = tokens[places[i, 0], places[i, 1]]
        count = 0
        for j in range(num_places):
            if tokens[places[j, 0], places[j, 1]] == candidate:
                count += 1
        if count > votes:
            token, votes = candidate, count
    num_left = 0
    for i in range(num_places):
        row, at = places[i, 0], places[i, 1]
        if tokens[row, at] == token and at + 1 < num_tokens[row]:
            places[num_left, 0], places[num_left, 1] = row, at + 1
            num_left += 1
    return token, votes, num_left
