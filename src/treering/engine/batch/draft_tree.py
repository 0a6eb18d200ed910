"""Draft trees as a pass takes them: which draft tokens of each row are computed, their depths and ancestor masks.

A draft is a chain or a tree of tokens that may follow a row's context.

    B rows   L columns   D drafted tokens of all rows   Q stop tokens
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import Int32Array, Int64Array
from treering.compiling.lean import kernel, lean
from treering.errors import StateError
from treering.history.types import Drafts
from treering.types import TokenIds

MOST_DRAFTS = 64
"""Most draft tokens of a row: each is one bit of an int64."""


class DraftTrees(NamedTuple):
    """Row b has entries offsets[b] to offsets[b + 1] - 1: the first tokens of its draft, in the drafter's order."""

    tokens: TokenIds  # int32 [D]
    offsets: Int64Array  # [B + 1]
    parents: Int32Array  # [D] index of the parent within the row, -1 is the context's last token
    depths: Int64Array  # [D] positions after the context's last token, from 1
    bits: Int64Array  # [D] mask of itself and its ancestors within the row; 0 for a chain, which sees all before it
    numbers: Int64Array  # [D] index of each within the drafter's row, which may hold more tokens


def no_drafts(num_rows: int) -> DraftTrees:
    """No draft for any row."""
    none, ids = np.zeros(0, np.int64), np.zeros(0, np.int32)
    return DraftTrees(ids, np.zeros(num_rows + 1, np.int64), ids, none, none, none)


def clip_drafts(
    drafts: Drafts, max_drafts: Int64Array, vocab_size: int, stop_tokens: Int32Array | None = None
) -> DraftTrees:
    """Clips each row's draft to its first `max_drafts[b]` tokens that a pass has to compute.

    The clip keeps a tree out of the next row's slots, although drafters respect the limit already. A row's draft also
    ends before the first token outside the vocabulary: the history may come from another tokenizer. Parents precede
    their children, so the first tokens of a tree are a tree.

    Stop tokens and their descendants are left out: whether a stop token comes is sampled at its parent, and no rollout
    continues after it. `count_accepted` reports to the drafter whether it came.

    Args:
        drafts: of B rows.
        max_drafts: int64 [B], most draft tokens of each row.
        vocab_size: of the model.
        stop_tokens: int32 [B, Q] of each row, padded with -1; None for none.

    Raises:
        StateError: a token before its parent.

    Example: with vocab_size=9, max_drafts [4, 4] and offsets [0, 3, 5], the chains [1, 9, 2] and [3, 4] become [1] and
    [3, 4], and where 4 stops the second row, [3]. The tree [5, 6, 7] with parents [-1, 0, -1] has depths [1, 2, 1] and
    bits [0, 0, 0b100].
    """
    if drafts.tokens.size == 0:
        return no_drafts(drafts.offsets.size - 1)
    size, num_rows = drafts.tokens.size, drafts.offsets.size - 1
    tokens, parents = np.empty(size, np.int32), np.empty(size, np.int32)
    columns, offsets = np.empty((3, size), np.int64), np.zeros(num_rows + 1, np.int64)
    scratch = np.empty((2, MOST_DRAFTS), np.int64)
    stops = np.zeros((num_rows, 0), np.int32) if stop_tokens is None else stop_tokens
    bad_row = _clip(
        drafts.tokens, drafts.offsets, drafts.parents, max_drafts, vocab_size, stops, tokens, offsets, parents, columns,
        scratch,
    )  # fmt: skip
    if bad_row >= 0:
        own = drafts.parents[drafts.offsets[bad_row] : drafts.offsets[bad_row + 1]]
        raise StateError(
            f"a draft token comes after its parent (-1: the context), and row {bad_row} has parents "
            f"{own.tolist()}; sort the draft by depth"
        )
    end = offsets[-1]
    return DraftTrees(tokens[:end], offsets, parents[:end], *columns[:, :end])


def count_accepted(
    drafts: Drafts,
    proposed: DraftTrees,
    leaders: Int64Array,
    contexts: TokenIds,
    num_tokens: Int64Array,
    num_accepted: Int64Array,
    leaves: Int64Array,
) -> tuple[Int64Array, Int64Array]:
    """Accepted tokens of each row and the index of the last one, counted in the drafter's own (unclipped) drafts.

    If the token sampled after the last accepted one was drafted there but clipped, it counts as accepted too.

    Args:
        drafts: the drafter's.
        proposed: the clipped drafts.
        leaders: int64 [B], the row whose draft each row was verified with.
        contexts: int32 [B, L], sampled tokens included.
        num_tokens: int64 [B], of each context.
        num_accepted: int64 [B], accepted tokens of the clipped drafts.
        leaves: int64 [B], index of the last accepted one among them, -1 for none.

    Example: of the chain [3, 4] only 3 was computed, because 4 is a stop token, and 3 was accepted. If the context ends
    in 3 4, the result is 2 tokens and index 1; if it ends in 3 5, it is 1 token and index 0.
    """
    counted = np.empty((2, num_accepted.size), np.int64)
    _fill_accepted(
        drafts.tokens, drafts.offsets, drafts.parents, proposed.offsets, proposed.numbers, leaders, contexts,
        num_tokens, num_accepted, leaves, counted,
    )  # fmt: skip
    return counted[0], counted[1]


@kernel
def _clip(
    tokens: TokenIds,
    offsets: Int64Array,
    parents: Int32Array,
    max_drafts: Int64Array,
    vocab_size: int,
    stop_tokens: Int32Array,
    tokens_out: TokenIds,
    offsets_out: Int64Array,
    parents_out: Int32Array,
    columns: Int64Array,
    scratch: Int64Array,
) -> int:
    """Fills the output arrays (columns: depths, bits, numbers); returns -1, or the first row with parents unsorted."""
    depths, bits, numbers = columns[0], columns[1], columns[2]
    ancestors, kept = scratch[0], scratch[1]
    at = 0
    for row in range(offsets.size - 1):
        first, start = offsets[row], at
        for number in range(min(offsets[row + 1] - first, max_drafts[row], MOST_DRAFTS)):
            token, parent = tokens[first + number], parents[first + number]
            if parent >= number or parent < -1:
                return row
            if token < 0 or token >= vocab_size:
                break
            kept_parent = kept[parent] if parent >= 0 else -1
            if (parent >= 0 and kept_parent < 0) or _is_in(token, stop_tokens[row]):
                kept[number] = -1
                continue
            place = kept[number] = at - start
            depths[at] = 1 + (depths[start + kept_parent] if kept_parent >= 0 else 0)
            ancestors[place] = (ancestors[kept_parent] if kept_parent >= 0 else 0) | np.int64(1) << place
            bits[at] = 0 if depths[at] == place + 1 else ancestors[place]
            tokens_out[at], parents_out[at], numbers[at] = token, kept_parent, number
            at += 1
        offsets_out[row + 1] = at
    return -1


@lean
def _is_in(token: int, stop_tokens: Int32Array) -> bool:
    found = False
    for stop in stop_tokens:
        found |= stop == token
    return found


@kernel
def _fill_accepted(
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
    counted: Int64Array,
) -> None:
    for row in range(leaves.size):
        leader = leaders[row]
        leaf = numbers[computed_offsets[leader] + leaves[row]] if leaves[row] >= 0 else -1
        counted[0, row], counted[1, row] = num_accepted[row], leaf
        first, drawn = offsets[leader], contexts[row, num_tokens[row] - 1]
        for number in range(leaf + 1, offsets[leader + 1] - first):
            if parents[first + number] == leaf and tokens[first + number] == drawn:
                counted[0, row], counted[1, row] = num_accepted[row] + 1, number
