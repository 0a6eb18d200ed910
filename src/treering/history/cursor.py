"""How far each source has come in one row: first behind its longest match, then a token further at each step.

Knows the three sources and what goes on from a match. Knows nothing of how a source is chosen, or how long drafts are.

    B rows   L columns
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treering.history.acceptance import NUM_LENGTHS, cell_of
from treering.history.index import MAX_DEPTH
from treering.history.live import MAX_PLACES, follow, longest_in_row
from treering.history.search import longest_in_history, most_frequent, skip_ended

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

_HISTORY, _SIBLINGS, _OWN = 0, 1, 2


class Rows(NamedTuple):
    """Contexts; see `DraftRows`."""

    tokens: Int32Array  # [B, L]
    num_tokens: Int64Array  # [B]
    num_prompt: Int64Array  # [B]
    groups: Int64Array  # [B]
    max_drafts: Int64Array  # [B]


class Texts(NamedTuple):
    """Indexes of the rows' prompts; see `Arena`."""

    slots: Int64Array  # [B]
    spans: Int64Array  # [slots, 2]
    text: Int32Array
    suffixes: Int32Array


class Limits(NamedTuple):
    """What a `Drafter` is set to."""

    uses: NDArray[np.bool_]  # [3], by source
    max_draft: int
    max_match: int
    max_window: int
    min_acceptance: float


class Cursor(NamedTuple):
    """How far each source has come in the row at hand: what goes on from what is matched and drafted."""

    length: Int64Array  # [3], tokens that match; 0 where nothing does
    first: Int64Array  # [3], of the suffixes; 0 for running rows
    end: Int64Array  # [3], of the suffixes or places
    depth: Int64Array  # [1], entries of the text that the suffixes agree in
    places: Int64Array  # [3, MAX_PLACES, 2], of running rows


@njit
def new_cursor() -> Cursor:
    """Room for the cursor of any row."""
    counts = np.empty((4, 3), np.int64)
    return Cursor(counts[0], counts[1], counts[2], counts[3], np.empty((3, MAX_PLACES, 2), np.int64))


@njit
def _find_in_history(rows: Rows, texts: Texts, limits: Limits, b: int, cursor: Cursor) -> None:
    start, size = texts.spans[texts.slots[b]]
    context = rows.tokens[b, : rows.num_tokens[b]]
    text, suffixes = texts.text[start : start + size + MAX_DEPTH], texts.suffixes[start : start + size]
    length, first, end = longest_in_history(text, suffixes, context, rows.num_prompt[b], limits.max_match)
    cursor.length[_HISTORY], cursor.first[_HISTORY], cursor.end[_HISTORY] = length, first, end
    cursor.depth[0] = length


@njit
def _find_in_siblings(rows: Rows, limits: Limits, b: int, cursor: Cursor) -> None:
    length, num_places = 0, 0
    context = rows.tokens[b, : rows.num_tokens[b]]
    for other in range(rows.groups.size):
        if other == b or rows.groups[other] != rows.groups[b]:
            continue
        length, num_places = longest_in_row(
            rows.tokens[other, : rows.num_tokens[other]],
            rows.num_prompt[other],
            context,
            rows.num_prompt[b],
            limits.max_match,
            limits.max_window,
            other,
            length,
            num_places,
            cursor.places[_SIBLINGS],
        )
    cursor.length[_SIBLINGS], cursor.first[_SIBLINGS], cursor.end[_SIBLINGS] = length, 0, num_places


@njit
def _find_in_own(rows: Rows, limits: Limits, b: int, cursor: Cursor) -> None:
    context = rows.tokens[b, : rows.num_tokens[b]]
    length, num_places = 0, 0
    if context.size > 1:
        length, num_places = longest_in_row(
            context, 0, context, 0, limits.max_match, limits.max_window, b, 0, 0, cursor.places[_OWN]
        )
    cursor.length[_OWN], cursor.first[_OWN], cursor.end[_OWN] = length, 0, num_places


@njit
def find(rows: Rows, texts: Texts, limits: Limits, b: int, cursor: Cursor) -> None:
    """Puts every source that is in use behind its longest match."""
    cursor.length[:] = 0
    if limits.uses[_HISTORY]:
        _find_in_history(rows, texts, limits, b, cursor)
    if limits.uses[_SIBLINGS]:
        _find_in_siblings(rows, limits, b, cursor)
    if limits.uses[_OWN]:
        _find_in_own(rows, limits, b, cursor)
    # A match that reaches the marker covers the whole prompt: there is no longer one.
    whole = rows.num_tokens[b] - rows.num_prompt[b] + 1
    for source in (_HISTORY, _SIBLINGS):
        if cursor.length[source] == whole:
            cursor.length[source] = NUM_LENGTHS


@njit
def step(rows: Rows, texts: Texts, b: int, source: int, cursor: Cursor) -> tuple[int, int]:
    """The most frequent next token of a source and its cell; the cursor moves behind it."""
    total = cursor.end[source] - cursor.first[source]
    if source == _HISTORY:
        start, size = texts.spans[texts.slots[b]]
        text, suffixes = texts.text[start : start + size + MAX_DEPTH], texts.suffixes[start : start + size]
        first, end = most_frequent(text, suffixes, cursor.depth[0], cursor.first[source], cursor.end[source])
        token, votes = text[suffixes[first] + cursor.depth[0]], end - first
        cursor.depth[0] += 1
        cursor.first[source] = skip_ended(text, suffixes, cursor.depth[0], first, end)
        cursor.end[source] = end
    else:
        token, votes, num_left = follow(rows.tokens, rows.num_tokens, cursor.places[source], total)
        cursor.end[source] = num_left
    cell = cell_of(source, cursor.length[source], votes, total)
    cursor.length[source] += 1
    return token, cell
