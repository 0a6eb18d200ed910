"""Where the end of a row's context occurs in the sorted suffixes of its prompt, and what stands behind it most often.

Knows one prompt's text. Knows nothing of acceptance. A pattern is the last k entries of a context, which is the marker
and the rollout so far: the marker stands for the whole prompt.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treering.history.index import MARKER

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

_MAX_PROBES = 256


@njit(inline="always")
def _compare(text: Int32Array, place: int, context: Int32Array, start: int, length: int) -> int:
    """-1, 0, 1: the text from a place on stands before, at or behind the context's last `length` tokens and one more.

    0 means that the pattern stands there and that a token follows it in the same rollout.
    """
    for i in range(length):
        at = context.size - length + i
        wanted = context[at] if at >= start else MARKER
        found = text[place + i]
        if found != wanted:
            return -1 if found < wanted else 1
    return 0 if text[place + length] != MARKER else -1


@njit
def _first_match(text: Int32Array, suffixes: Int32Array, context: Int32Array, start: int, length: int) -> int:
    """Index of the first suffix that has the pattern and a token behind it, -1 where there is none."""
    low, high = 0, suffixes.size
    while low < high:
        middle = (low + high) >> 1
        if _compare(text, suffixes[middle], context, start, length) < 0:
            low = middle + 1
        else:
            high = middle
    if low < suffixes.size and _compare(text, suffixes[low], context, start, length) == 0:
        return low
    return -1


@njit
def _end_of_match(
    text: Int32Array, suffixes: Int32Array, context: Int32Array, start: int, length: int, first: int
) -> int:
    low, high = first + 1, suffixes.size
    while low < high:
        middle = (low + high) >> 1
        if _compare(text, suffixes[middle], context, start, length) == 0:
            low = middle + 1
        else:
            high = middle
    return low


@njit
def longest_in_history(
    text: Int32Array, suffixes: Int32Array, context: Int32Array, start: int, max_match: int
) -> tuple[int, int, int]:
    """(length, first, end) of the longest pattern that occurs with a token behind it; length 0 where none does.

    A shorter pattern occurs wherever a longer one does, so lengths are bisected; the longest is tried first, because a
    row that follows an old rollout matches in full.

    Args:
        text: int32 [N + MAX_DEPTH], markers behind the N entries.
        suffixes: int32 [N].
        context: int32 [n], a row's valid tokens.
        start: length of the prompt, where the rollout begins.
        max_match: of the pattern, marker included.
    """
    length, first = 0, -1
    low, high = 1, min(max_match, context.size - start + 1)
    probe = high
    while low <= high:
        found = _first_match(text, suffixes, context, start, probe)
        if found >= 0:
            length, first = probe, found
            low = probe + 1
        else:
            high = probe - 1
        probe = (low + high) >> 1
    if length == 0:
        return 0, 0, 0
    return length, first, _end_of_match(text, suffixes, context, start, length, first)


@njit(inline="always")
def _bound(text: Int32Array, suffixes: Int32Array, depth: int, token: int, low: int, high: int) -> int:
    """First of the suffixes [low, high), which agree in `depth` entries, whose next entry is at least `token`."""
    while low < high:
        middle = (low + high) >> 1
        if text[suffixes[middle] + depth] < token:
            low = middle + 1
        else:
            high = middle
    return low


@njit
def skip_ended(text: Int32Array, suffixes: Int32Array, depth: int, first: int, end: int) -> int:
    """First of the suffixes [first, end) with a token behind `depth` entries; rollouts that end there stand before."""
    return int(_bound(text, suffixes, depth, 0, first, end))


@njit
def _newest(suffixes: Int32Array, first: int, end: int) -> int:
    newest = suffixes[first]
    for i in range(first + 1, end):
        newest = min(newest, suffixes[i])
    return int(newest)


@njit
def most_frequent(text: Int32Array, suffixes: Int32Array, depth: int, first: int, end: int) -> tuple[int, int]:
    """(first, end) of the suffixes in [first, end) that go on with the most frequent token; of equals, the newest one.

    Suffixes stand by their next token, so only places as far apart as the longest run so far need a look. At most 256
    looks: a token with less than that share of the suffixes may be missed where every token is so rare.
    """
    best_first, best_end = first, first
    floor = (end - first) // _MAX_PROBES
    at = first
    while True:
        probe = at + max(best_end - best_first, floor, 1) - 1
        if probe >= end:
            return best_first, best_end
        token = text[suffixes[probe] + depth]
        run_first = _bound(text, suffixes, depth, token, at, probe)
        run_end = _bound(text, suffixes, depth, token + 1, probe + 1, end)
        surplus = (run_end - run_first) - (best_end - best_first)
        if surplus > 0 or (
            surplus == 0 and _newest(suffixes, run_first, run_end) < _newest(suffixes, best_first, best_end)
        ):
            best_first, best_end = run_first, run_end
        at = run_end
