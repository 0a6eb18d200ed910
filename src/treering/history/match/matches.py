"""Matches of a row's context, with the features that weigh the token after each.

A match is a position in an earlier text. Either the tokens before it equal the end of the context, or they do after one
edit: a token replaced, added or left out.

    M matches
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.history.features import NUM_LENGTH_CLASSES, edit_bucket, length_bucket
from treering.lean import lean

MAX_MATCHES = 64
IN_HISTORY, IN_RUNNING, IN_OTHERS = range(3)
"""The texts that matches are in: history of the row's prompt, running rollouts, history of other prompts."""


MATCH = np.dtype(
    [
        ("at", np.int32),  # position of the token after the match
        ("source", np.int32),
        ("text", np.int32),  # see `IN_HISTORY`
        ("length", np.int32),
        ("edit", np.int32),  # bucket
        ("shift", np.int32),  # bucket
        ("weight", np.float64),  # of its vote, apart from its length
    ],
    align=True,
)
"""A match. Its fields lie side by side, so that one address leads to all of them."""

Matches = NDArray[Any]
"""The matches of one row, `MATCH` [M], or of several, [B, M]."""


@lean
def is_known(matches: Matches, num: int, text: int, at: int) -> bool:
    """Whether the matches include a position of a text."""
    found = False
    for i in range(num):
        if matches[i].at == at and matches[i].text == text:
            found = True
            break
    return found


@lean
def put(matches: Matches, num: int, source: int, text: int, at: int, length: int, edit: int, shift: int) -> int:
    """Adds a match unless there are `MAX_MATCHES`; returns the new number of matches."""
    if num == MAX_MATCHES:
        return num
    match = matches[np.uintp(num)]
    match.at, match.text, match.source, match.length = at, text, source, length
    match.edit, match.shift = edit_bucket(edit), shift
    return num + 1


@lean
def longest_of(matches: Matches, num: int) -> int:
    """The length of the longest match."""
    longest = 0
    for i in range(num):
        longest = max(longest, matches[i].length)
    return longest


@lean
def vote_bucket(length: int) -> int:
    """The bucket of a length, as combined with an edit."""
    return int(min(length_bucket(length), NUM_LENGTH_CLASSES - 1))
