"""Matches of a row's context, how long they are, and the features that weigh the token after each.

A match is a position in an earlier text. The tokens before it equal the end of the context, exactly or after one edit:
a token replaced, added or dropped.

    M matches
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.arrays import Int32Array
from treering.compiling.lean import lean
from treering.history.features import NUM_LENGTH_CLASSES, edit_bucket, length_bucket
from treering.history.store.prompt_index import MARKER

MAX_MATCHES = 64
MAX_LENGTH = 48
"""Longest match that is measured."""
LONG_ENOUGH = 16
"""Matches of this length are not extended past an edit."""
MAX_EDIT = 16
_WHOLE = 8
"""Added to the length of a match that reaches back to the beginning of the rollout, because it is the whole context."""
IN_HISTORY, IN_RUNNING, IN_OTHERS = range(3)
"""Text that a match is in: history of the row's prompt, running rollouts, history of other prompts."""


MATCH = np.dtype(
    [
        ("at", np.int32),  # position of the token after the match
        ("source", np.int32),
        ("text", np.int32),  # see `IN_HISTORY`
        ("length", np.int32),
        ("edit", np.int32),  # bucket
        ("shift", np.int32),  # bucket
        ("weight", np.float64),  # of its vote, without its length
    ],
    align=True,
)
"""A match. Its fields are adjacent in memory, so that one address leads to all of them."""

Matches = NDArray[Any]
"""Matches of one row, `MATCH` [M], or of several, [B, M]."""


@lean
def is_known(matches: Matches, num: int, text: int, at: int) -> bool:
    """Return whether the matches include a position of a text."""
    found = False
    for i in range(num):
        if matches[i].at == at and matches[i].text == text:
            found = True
            break
    return found


@lean
def put(matches: Matches, num: int, source: int, text: int, at: int, length: int, edit: int, shift: int) -> int:
    """Add a match unless there are `MAX_MATCHES`; return the new number of matches."""
    if num == MAX_MATCHES:
        return num
    match = matches[np.uintp(num)]
    match.at, match.text, match.source, match.length = at, text, source, length
    match.edit, match.shift = edit_bucket(edit), shift
    return num + 1


@lean
def longest_of(matches: Matches, num: int) -> int:
    """Return the length of the longest match."""
    longest = 0
    for i in range(num):
        longest = max(longest, matches[i].length)
    return longest


@lean
def vote_bucket(length: int) -> int:
    """Return the bucket of a length, as combined with an edit."""
    return int(min(length_bucket(length), NUM_LENGTH_CLASSES - 1))


@lean
def agree(text: Int32Array, at: int, context: Int32Array, last: int, begin: int, most: int) -> int:
    """Count equal entries up to text[at] and up to context[last]; before `begin` the context has a marker."""
    if at < 0 or (last >= begin and text[np.uintp(at)] != context[np.uintp(last)]):
        return 0
    # A text begins with a marker, which equals no token; `at + 1` is for contexts with invalid token ids.
    limit = min(most, last - begin + 1, at + 1)
    count = 0
    while count < limit and text[np.uintp(at - count)] == context[np.uintp(last - count)]:
        count += 1
    if count == last - begin + 1 and count < most and count <= at and text[at - count] == MARKER:
        count += 1
    return count


@lean(inline=False)
def agree_after_edit(text: Int32Array, at: int, context: Int32Array, last: int, begin: int) -> int:
    """Return the most entries that agree after skipping one token of the text, of the context, or of both."""
    best = agree(text, at, context, last - 1, begin, MAX_EDIT)
    # A marker is not skipped: the text before it belongs to another rollout.
    if at >= 0 and text[at] >= 0:
        best = max(best, agree(text, at - 1, context, last - 1, begin, MAX_EDIT))
        best = max(best, agree(text, at - 1, context, last, begin, MAX_EDIT))
    return int(best)


@lean
def measure(text: Int32Array, at: int, context: Int32Array, begin: int) -> tuple[int, int]:
    """Return length and edit of the match that ends at text[at]."""
    num_equal = agree(text, at, context, context.size - 1, begin, MAX_LENGTH)
    length, edit = with_edit(text, at, context, begin, num_equal)
    return length, edit


@lean
def with_edit(text: Int32Array, at: int, context: Int32Array, begin: int, length: int) -> tuple[int, int]:
    """Return length and edit like `measure`, for a known number of equal entries."""
    last = context.size - 1
    if length < MAX_LENGTH and last - length == begin - 2:
        return length + _WHOLE, 0
    if length >= LONG_ENOUGH:
        return length, 0
    return length, agree_after_edit(text, at - length, context, last - length, begin)
