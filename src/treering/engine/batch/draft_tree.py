"""Drafts as a pass takes them: what of each row's chain or tree is computed, how deep it stands and what it sees.

Knows the drafter's arrays, the model's vocabulary and stop tokens. Knows nothing of slots or how drafts come about.

    B rows   L columns   D drafted tokens of all rows   Q stop tokens
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from treering.arrays import Int32Array, Int64Array
from treering.errors import StateError
from treering.history.types import Drafts
from treering.types import TokenIds

MOST_DRAFTS = 64
"""Drafted tokens of a row: each is one bit of an int64."""


class DraftTrees(NamedTuple):
    """Row b has entries offsets[b] to offsets[b + 1] - 1: the first tokens of its draft, in the drafter's order."""

    tokens: TokenIds  # int32 [D]
    offsets: Int64Array  # [B + 1]
    parents: Int32Array  # [D] number within the row of the token before it, -1 is the context's last one
    depths: Int64Array  # [D] positions behind the context's last token, from 1
    bits: Int64Array  # [D] itself and what stands before it, by number; 0 where that is all from number 0 on
    numbers: Int64Array  # [D] of each within its row as its drafter counts, who may have drafted more


def nothing(num_rows: int) -> DraftTrees:
    """No draft for any row."""
    none, ids = np.zeros(0, np.int64), np.zeros(0, np.int32)
    return DraftTrees(ids, np.zeros(num_rows + 1, np.int64), ids, none, none, none)


def clip_drafts(drafts: Drafts, room: Int64Array, vocab_size: int, stop_tokens: Int32Array | None = None) -> DraftTrees:
    """The part of each row's draft that is worth computing: its first tokens, as many as there are slots for.

    A row has room for `room[b]` tokens, however they branch, so a tree never reaches into its neighbour; a drafter
    keeps to it anyway. It also ends before the first token that the model does not have: a history may be another
    tokenizer's. Parents stand before their children, so the first tokens of a tree are a tree.

    A stop token, and what stands behind one, is left out: whether it comes is drawn behind its parent, and no rollout
    goes on behind it. `as_drafted` tells the drafter what became of it.

    Args:
        drafts: of B rows.
        room: int64 [B].
        vocab_size: of the model.
        stop_tokens: int32 [B, Q] of each row, -1 where it has fewer; None for none.

    Raises:
        StateError: a token before its parent.

    Example: with vocab_size=9, room [4, 4] and offsets [0, 3, 5], the chains [1, 9, 2] and [3, 4] become [1] and
    [3, 4], and where 4 stops the second row, [3]. The tree [5, 6, 7] with parents [-1, 0, -1] has depths [1, 2, 1] and
    bits [0, 0, 0b100].
    """
    if drafts.tokens.size == 0:
        return nothing(drafts.offsets.size - 1)
    size, num_rows = drafts.tokens.size, drafts.offsets.size - 1
    tokens, parents = np.empty(size, np.int32), np.empty(size, np.int32)
    columns, offsets = np.empty((3, size), np.int64), np.zeros(num_rows + 1, np.int64)
    stops = np.zeros((num_rows, 0), np.int32) if stop_tokens is None else stop_tokens
    bad_row = _arrange(
        drafts.tokens, drafts.offsets, drafts.parents, room, vocab_size, stops, tokens, offsets, parents, columns
    )
    if bad_row >= 0:
        own = drafts.parents[drafts.offsets[bad_row] : drafts.offsets[bad_row + 1]]
        raise StateError(
            f"a drafted token stands behind its parent, -1 being the context, and row {bad_row} has parents "
            f"{own.tolist()}; sort the draft by depth"
        )
    end = offsets[-1]
    return DraftTrees(tokens[:end], offsets, parents[:end], *columns[:, :end])


def as_drafted(
    drafts: Drafts,
    proposed: DraftTrees,
    leaders: Int64Array,
    contexts: TokenIds,
    num_tokens: Int64Array,
    num_accepted: Int64Array,
    leaves: Int64Array,
) -> tuple[Int64Array, Int64Array]:
    """How many tokens of each row's or its leader's draft came true, and the last one's number, as the drafter counts.

    A token that was drawn behind the last accepted one, and that was drafted there and left out, came true as well.

    Args:
        drafts: the drafter's.
        proposed: what was computed of them.
        leaders: int64 [B], the row whose draft each one was verified along.
        contexts: int32 [B, L], with what was drawn.
        num_tokens: int64 [B], of each context.
        num_accepted: int64 [B], of the computed ones.
        leaves: int64 [B], the last accepted one's number among them, -1 for none.

    Example: of the chain [3, 4] only 3 was computed, because 4 stops the row. With 3 accepted, 1 token and number 0,
    and a context that ends in 3 4, it is 2 tokens and number 1; where it ends in 3 5, it stays 1 token and number 0.
    """
    told = np.empty((2, num_accepted.size), np.int64)
    _count_left_out(
        drafts.tokens, drafts.offsets, drafts.parents, proposed.offsets, proposed.numbers, leaders, contexts,
        num_tokens, num_accepted, leaves, told,
    )  # fmt: skip
    return told[0], told[1]


@njit(cache=True, nogil=True)
def _arrange(
    tokens: TokenIds,
    offsets: Int64Array,
    parents: Int32Array,
    room: Int64Array,
    vocab_size: int,
    stop_tokens: Int32Array,
    tokens_out: TokenIds,
    offsets_out: Int64Array,
    parents_out: Int32Array,
    columns: Int64Array,
) -> int:
    """Fills the arrays, depths, bits and numbers as columns; -1, or the first row with a token before its parent."""
    depths, bits, numbers = columns[0], columns[1], columns[2]
    ancestors, places = np.empty(MOST_DRAFTS, np.int64), np.empty(MOST_DRAFTS, np.int64)
    at = 0
    for row in range(offsets.size - 1):
        first, start = offsets[row], at
        for number in range(min(offsets[row + 1] - first, room[row], MOST_DRAFTS)):
            token, parent = tokens[first + number], parents[first + number]
            if parent >= number or parent < -1:
                return row
            if token < 0 or token >= vocab_size:
                break
            above = places[parent] if parent >= 0 else -1
            if (parent >= 0 and above < 0) or _is_in(token, stop_tokens[row]):
                places[number] = -1
                continue
            place = places[number] = at - start
            depths[at] = 1 + (depths[start + above] if above >= 0 else 0)
            ancestors[place] = (ancestors[above] if above >= 0 else 0) | np.int64(1) << place
            bits[at] = 0 if depths[at] == place + 1 else ancestors[place]
            tokens_out[at], parents_out[at], numbers[at] = token, above, number
            at += 1
        offsets_out[row + 1] = at
    return -1


@njit(cache=True, nogil=True)
def _is_in(token: int, stop_tokens: Int32Array) -> bool:
    found = False
    for stop in stop_tokens:
        found |= stop == token
    return found


@njit(cache=True, nogil=True)
def _count_left_out(
    tokens: TokenIds,
    offsets: Int64Array,
    parents: Int32Array,
    computed_offsets: Int64Array,
    numbers: Int64Array,
    leaders: Int64Array,
    contexts: TokenIds,
    num_tokens: Int64Array,
    num_accepted: Int64Array,
    leaves: Int64Array,
    told: Int64Array,
) -> None:
    for row in range(leaves.size):
        leader = leaders[row]
        leaf = numbers[computed_offsets[leader] + leaves[row]] if leaves[row] >= 0 else -1
        told[0, row], told[1, row] = num_accepted[row], leaf
        first, drawn = offsets[leader], contexts[row, num_tokens[row] - 1]
        for number in range(leaf + 1, offsets[leader + 1] - first):
            if parents[first + number] == leaf and tokens[first + number] == drawn:
                told[0, row], told[1, row] = num_accepted[row] + 1, number
