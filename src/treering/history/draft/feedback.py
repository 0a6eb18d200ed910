"""The engine's feedback on the latest drafts: checks it, and derives what became of each drafted token."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.compiling.lean import kernel, lean
from treering.errors import InputError, StateError
from treering.history.features import ACCEPTED, NOT_TRIED, REFUSED
from treering.history.jit import STAMP
from treering.history.match.running_rows import RowStates
from treering.history.types import DraftRows, Drafts

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
        InputError: wrong shapes or types.
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
    return counts.astype(np.int64, copy=False), was_cut, last.astype(np.int64, copy=False)


def check_fault(fault: int, drafts: Drafts, counts: Int64Array, last: Int64Array) -> None:
    """Raises what `mark` has found.

    Raises:
        InputError: more accepted than drafted tokens, or a leaf that is not that deep.
    """
    if fault == 0:
        return
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


@lean
def _find_fault(
    offsets: Int64Array, parents: Int32Array, counts: Int64Array, leaves: Int64Array, has_leaves: bool
) -> int:
    """What is wrong with an engine's answer: a count of accepted tokens, a leaf, or 0 for nothing."""
    fault = 0
    for b in range(counts.size):
        size = offsets[b + 1] - offsets[b]
        if not 0 <= counts[b] <= size:
            return _WRONG_COUNT
        if has_leaves and (not -1 <= leaves[b] < size or _depth_of(parents[offsets[b] :], leaves[b]) != counts[b]):
            fault = _WRONG_LEAF
    return fault


@lean
def _depth_of(parents: Int32Array, index: int) -> int:
    """Tokens from the beginning of a row's draft down to an index, itself included."""
    depth = 0
    while index >= 0:
        depth += 1
        index = parents[index]
    return depth


def _compile(stamp: int) -> Callable[..., int]:
    """`mark`, cached by its sources; see `stamp`."""

    @kernel
    def mark(
        offsets: Int64Array,
        parents: Int32Array,
        accepted: Int64Array,
        leaves: Int64Array,
        has_leaves: bool,
        was_cut: BoolArray,
        was_accepted: NDArray[np.int8],
        states: RowStates,
        slots: Int64Array,
    ) -> int:
        """Writes what became of every drafted token, 1, 0, or -1 where it is not known, and of every row's draft.

        Returns 0; or what is wrong with the engine's answer, see `check_fault`, and then writes nothing.

        Args:
            offsets: int64 [B + 1], of the rows' drafts.
            parents: int32 [D], within the row.
            accepted: int64 [B], accepted tokens.
            leaves: int64 [B], number of the last accepted token, -1 for none; below -1 it is
                derived from the count, up to where the draft branches.
            has_leaves: whether the engine gave leaves, which are checked then.
            was_cut: bool [B], rows that were cut off there: later drafted tokens were not tried.
            was_accepted: int8 [D], written.
            states: written in the slots of rows with a draft.
            slots: int64 [B], of the rows.
        """
        assert stamp >= 0
        fault: int = _find_fault(offsets, parents, accepted, leaves, has_leaves)
        if fault != 0:
            return fault
        for b in range(offsets.size - 1):
            begin, end = offsets[b], offsets[b + 1]
            if begin == end:
                continue
            num_left: int = _mark_row(parents[begin:end], accepted[b], leaves[b], was_cut[b], was_accepted[begin:end])
            slot = slots[b]
            states.num_expected[slot] = states.num_tokens[slot] + accepted[b] + 1
            if was_cut[b] or num_left < 0:
                states.state[slot] = NOT_TRIED
            else:
                states.state[slot] = REFUSED if num_left > 0 else ACCEPTED
        return 0

    compiled: Callable[..., int] = mark
    return compiled


@lean
def _mark_row(parents: Int32Array, accepted: int, leaf: int, was_cut: bool, was_accepted: NDArray[np.int8]) -> int:
    """`mark` of one row; returns how many tokens were drafted right after the last accepted one, -1 if unknown."""
    is_known, num_left = True, 0
    if leaf < -1:
        leaf, is_known = _only_path(parents, accepted)
    for i in range(parents.size):
        was_accepted[i] = -1
    index = leaf
    while index >= 0:
        was_accepted[index] = 1
        index = parents[index]
    for i in range(parents.size):
        if was_accepted[i] == 1:
            continue
        if parents[i] == leaf:
            num_left += 1
            was_accepted[i] = 0 if is_known and not was_cut else -1
        elif parents[i] < 0 or was_accepted[parents[i]] == 1:
            was_accepted[i] = 0
    return num_left if is_known else -1


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


mark = _compile(STAMP)
