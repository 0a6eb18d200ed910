"""Drafts as a pass takes them: what of each row's chain or tree is verified, how deep it stands and what it sees.

Knows the drafter's arrays and the model's vocabulary. Knows nothing of rows, slots or how drafts come about.

    B rows   D drafted tokens of all rows
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treering.errors import StateError
from treering.history.records import Drafts
from treering.types import TokenIds

Int64Array = NDArray[np.int64]

MOST_DRAFTS = 64
"""Drafted tokens of a row: each is one bit of an int64."""


class Proposed(NamedTuple):
    """Row b has entries offsets[b] to offsets[b + 1] - 1: the first tokens of its draft, in the drafter's order."""

    tokens: TokenIds  # int32 [D]
    offsets: Int64Array  # [B + 1]
    parents: NDArray[np.int32]  # [D] number within the row of the token before it, -1 is the context's last one
    depths: Int64Array  # [D] positions behind the context's last token, from 1
    bits: Int64Array  # [D] itself and what stands before it, by number; 0 where that is all from number 0 on


def nothing(num_rows: int) -> Proposed:
    """No draft for any row."""
    none, ids = np.zeros(0, np.int64), np.zeros(0, np.int32)
    return Proposed(ids, np.zeros(num_rows + 1, np.int64), ids, none, none)


def readable(drafts: Drafts, room: Int64Array, vocab_size: int) -> Proposed:
    """The part of each row's draft that can be computed: its first tokens, as many as there are slots for.

    A row has room for `room[b]` tokens, however they branch, so a tree never reaches into its neighbour; a drafter
    keeps to it anyway. It also ends before the first token that the model does not have: a history may be another
    tokenizer's. Parents stand before their children, so the first tokens of a tree are a tree.

    Raises:
        StateError: a token before its parent.

    Example: with vocab_size=9, room [4, 4] and offsets [0, 3, 5], the chains [1, 9, 2] and [3, 4] become [1] and
    [3, 4]. The tree [5, 6, 7] with parents [-1, 0, -1] has depths [1, 2, 1] and bits [0, 0, 0b100].
    """
    if drafts.tokens.size == 0:
        return nothing(drafts.offsets.size - 1)
    size = drafts.tokens.size
    tokens, parents = np.empty(size, np.int32), np.empty(size, np.int32)
    depths, bits = np.empty(size, np.int64), np.empty(size, np.int64)
    offsets = np.zeros(drafts.offsets.size, np.int64)
    bad_row = _arrange(
        drafts.tokens, drafts.offsets, drafts.parents, room, vocab_size, tokens, offsets, parents, depths, bits
    )
    if bad_row >= 0:
        own = drafts.parents[drafts.offsets[bad_row] : drafts.offsets[bad_row + 1]]
        raise StateError(
            f"a drafted token stands behind its parent, -1 being the context, and row {bad_row} has parents "
            f"{own.tolist()}; sort the draft by depth"
        )
    end = offsets[-1]
    return Proposed(tokens[:end], offsets, parents[:end], depths[:end], bits[:end])


@njit(cache=True, nogil=True)
def _arrange(
    tokens: TokenIds,
    offsets: Int64Array,
    parents: NDArray[np.int32],
    room: Int64Array,
    vocab_size: int,
    tokens_out: TokenIds,
    offsets_out: Int64Array,
    parents_out: NDArray[np.int32],
    depths_out: Int64Array,
    bits_out: Int64Array,
) -> int:
    """Fills the arrays; -1, or the first row with a token before its parent."""
    ancestors = np.empty(MOST_DRAFTS, np.int64)
    at = 0
    for row in range(offsets.size - 1):
        first, start = offsets[row], at
        for number in range(min(offsets[row + 1] - first, room[row], MOST_DRAFTS)):
            token, parent = tokens[first + number], parents[first + number]
            if parent >= number or parent < -1:
                return row
            if token < 0 or token >= vocab_size:
                break
            is_behind = parent >= 0
            depths_out[at] = 1 + (depths_out[start + parent] if is_behind else 0)
            ancestors[number] = (ancestors[parent] if is_behind else 0) | np.int64(1) << number
            bits_out[at] = 0 if depths_out[at] == number + 1 else ancestors[number]
            tokens_out[at], parents_out[at] = token, parent
            at += 1
        offsets_out[row + 1] = at
    return -1
