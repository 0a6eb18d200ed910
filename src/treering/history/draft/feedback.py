"""The engine's feedback on the latest drafts: checks it, and derives what became of each drafted token."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.errors import InputError, StateError
from treering.history.features import ACCEPTED, NOT_TRIED, REFUSED
from treering.history.jit import STAMP
from treering.history.match.running_rows import RowStates
from treering.history.types import DraftRows, Drafts
from treering.lean import kernel, lean

NO_LEAF = -2
"""Stands for a row whose last accepted token the engine does not name."""
_WRONG_COUNT, _WRONG_LEAF = 1, 2


def check_latest(latest: tuple[DraftRows, Drafts] | None, rows: DraftRows) -> Drafts:
    """The drafts of the latest rows.

    Raises:
        StateError: there are none, or of other rows.
    """
    if latest is None or latest[0] is not rows:
        raise StateError("observe belongs to the latest propose, once, and takes its rows object; propose first")
    return latest[1]


def as_counts(
    drafts: Drafts, accepted: NDArray[np.integer[Any]], ended: BoolArray | None, leaves: NDArray[np.integer[Any]] | None
) -> tuple[Int64Array, BoolArray, Int64Array]:
    """Accepted tokens, rows that were cut off, and last accepted tokens (-2 where none are given), one per row.

    Raises:
        InputError: wrong shapes or types, more accepted than drafted ones, or a leaf that is not that deep.
    """
    counts = np.asarray(accepted)
    was_cut = np.zeros(counts.shape, np.bool_) if ended is None else np.asarray(ended)
    last = np.full(counts.shape, NO_LEAF, np.int64) if leaves is None else np.asarray(leaves)
    shape = (drafts.offsets.size - 1,)
    if not (_is_integers(counts, shape) and _is_integers(last, shape) and was_cut.shape == shape) or (
        was_cut.dtype != np.bool_
    ):
        raise InputError(
            f"accepted and leaves hold integers and ended booleans, all of shape {shape}, got {counts.dtype} of shape "
            f"{counts.shape}, {last.dtype} of shape {last.shape} and {was_cut.dtype} of shape {was_cut.shape}; pass "
            "one entry per row"
        )
    counts, last = counts.astype(np.int64, copy=False), last.astype(np.int64, copy=False)
    fault = find_fault(drafts.offsets, drafts.parents, counts, last, leaves is not None)
    if fault == 0:
        return counts, was_cut, last
    num_drafted = drafts.offsets[1:] - drafts.offsets[:-1]
    if fault == _WRONG_COUNT:
        raise InputError(
            f"a row accepts between none and all of its drafted tokens, got {counts.tolist()} of "
            f"{num_drafted.tolist()}; count drafted tokens only, without the one sampled after them"
        )
    raise InputError(
        f"a leaf is a number within its row's draft and as deep as the row's accepted tokens, -1 for none, got "
        f"{last.tolist()} for {counts.tolist()} of {num_drafted.tolist()}; count within the row"
    )


def _is_integers(values: NDArray[Any], shape: tuple[int, ...]) -> bool:
    return values.shape == shape and values.dtype.kind in "iu"


@kernel
def find_fault(
    offsets: Int64Array, parents: Int32Array, counts: Int64Array, leaves: Int64Array, has_leaves: bool
) -> int:
    """What is wrong with an engine's answer: a count of accepted tokens, a leaf, or 0 for nothing."""
    fault = 0
    for b in range(counts.size):
        size = offsets[b + 1] - offsets[b]
        if not 0 <= counts[b] <= size:
            return _WRONG_COUNT
        if has_leaves and (not -1 <= leaves[b] < size or depth_of(parents[offsets[b] :], leaves[b]) != counts[b]):
            fault = _WRONG_LEAF
    return fault


@lean
def depth_of(parents: Int32Array, index: int) -> int:
    """Tokens from the beginning of a row's draft down to a index, itself included."""
    depth = 0
    while index >= 0:
        depth += 1
        index = parents[index]
    return depth


@kernel
def mark(
    offsets: Int64Array,
    parents: Int32Array,
    accepted: Int64Array,
    leaves: Int64Array,
    was_cut: BoolArray,
    was_accepted: NDArray[np.int8],
    num_left: Int64Array,
) -> None:
    """Writes what became of every drafted token: 1, 0, or -1 where it is not known.

    Args:
        offsets: int64 [B + 1], of the rows' drafts.
        parents: int32 [D], within the row.
        accepted: int64 [B], accepted tokens.
        leaves: int64 [B], number of the last accepted token, -1 for none; below -1 it is
            derived from the count, up to where the draft branches.
        was_cut: bool [B], rows that were cut off there: later drafted tokens were not tried.
        was_accepted: int8 [D], written.
        num_left: int64 [B], written: tokens drafted right after the last accepted one, -1 if unknown.
    """
    for b in range(offsets.size - 1):
        begin, size = offsets[b], offsets[b + 1] - offsets[b]
        for i in range(begin, begin + size):
            was_accepted[i] = -1
        leaf, is_known = leaves[b], True
        if leaf < -1:
            leaf, is_known = _only_path(parents[begin : begin + size], accepted[b])
        index = leaf
        while index >= 0:
            was_accepted[begin + index] = 1
            index = parents[begin + index]
        num_left[b] = 0 if is_known else -1
        for i in range(size):
            if was_accepted[begin + i] == 1:
                continue
            parent = parents[begin + i]
            if parent == leaf:
                num_left[b] += is_known
                was_accepted[begin + i] = 0 if is_known and not was_cut[b] else -1
            elif parent < 0 or was_accepted[begin + parent] == 1:
                was_accepted[begin + i] = 0


@lean
def _only_path(parents: Int32Array, length: int) -> tuple[int, bool]:
    """The index that many tokens down a draft, and whether there is no other; else the last one before it branches."""
    index = -1
    for _ in range(length):
        child, num_children = -1, 0
        for i in range(index + 1, parents.size):
            if parents[i] == index:
                child, num_children = i, num_children + 1
        if num_children != 1:
            return index, False
        index = child
    return index, True


def _compile(stamp: int) -> Callable[..., None]:
    """`set_states`, cached by its sources; see `stamp`."""

    @kernel
    def set_states(
        states: RowStates,
        slots: Int64Array,
        offsets: Int64Array,
        counts: Int64Array,
        num_left: Int64Array,
        was_cut: BoolArray,
    ) -> None:
        """Notes in each row's slot what its draft came to."""
        assert stamp >= 0
        for b in range(counts.size):
            if offsets[b + 1] == offsets[b]:
                continue
            slot = slots[b]
            states.num_expected[slot] = states.num_tokens[slot] + counts[b] + 1
            if was_cut[b] or num_left[b] < 0:
                states.state[slot] = NOT_TRIED
            else:
                states.state[slot] = REFUSED if num_left[b] > 0 else ACCEPTED

    compiled: Callable[..., None] = set_states
    return compiled


set_states = _compile(STAMP)
