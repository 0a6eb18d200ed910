"""Sequences of a padded batch, and where their tokens stand in it.

B rows   T columns   F real tokens
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.errors import InputError


class PaddedSequences(NamedTuple):
    """The sequences of a batch, row after row."""

    sequences: list[NDArray[np.integer[Any]]]
    """Integers as given, one array per sequence."""
    real: BoolArray
    """bool [B, T], True where a token is real; in row-major order these are the sequences one after another."""


def split_padded(ids: ArrayLike, mask: ArrayLike | None, position_ids: ArrayLike | None) -> PaddedSequences:
    """Splits a padded batch into its sequences.

    Args:
        ids: integers [B, T].
        mask: [B, T], 0 at padding on either side of a row's tokens; None if there is none.
        position_ids: [B, T] or [T]; a row that packs several sequences begins each at a smaller position. None for one
            sequence a row.

    Raises:
        InputError: other shapes or types, padding between tokens, positions that skip, or a row that begins inside of a
            sequence.

    Example: the row [0, 5, 6] with the mask [0, 1, 1] is the sequence [5, 6]; [5, 6, 5, 7] with the positions
    [0, 1, 0, 1] are [5, 6] and [5, 7].
    """
    tokens = _integers("ids", ids)
    if tokens.ndim != 2:
        raise InputError(f"ids is a batch [rows, columns], got shape {tokens.shape}; add a dimension for one row")
    real = np.ones(tokens.shape, np.bool_) if mask is None else _real("mask", mask, tokens.shape)
    rows, columns = np.nonzero(real)
    begins = np.ones(rows.size, np.bool_)
    begins[1:] = rows[1:] != rows[:-1]
    steps = np.diff(columns, prepend=0)
    if position_ids is not None:
        positions = np.broadcast_to(_integers("position_ids", position_ids), tokens.shape)[real]
        _check_whole(rows, columns, positions)
        steps = np.diff(positions, prepend=0)
        begins |= steps < 1
    skipped = np.flatnonzero(~begins & (steps != 1))
    if skipped.size:
        row, column = int(rows[skipped[0]]), int(columns[skipped[0]])
        raise InputError(
            f"the tokens of a sequence stand next to each other, and row {row} skips before column {column}; move the "
            "padding to the sides of the row"
        )
    starts = np.flatnonzero(begins)[1:]
    return PaddedSequences(sequences=np.split(tokens[real], starts) if rows.size else [], real=real)


def places_of(real: BoolArray, indices: Int32Array) -> Int64Array:
    """int64 [B, T]: the packed index of each token, -1 at padding; `indices` int32 [F] in row-major order."""
    places = np.full(real.shape, -1, np.int64)
    places[real] = indices
    return places


def _check_whole(rows: NDArray[np.int64], columns: NDArray[np.int64], positions: NDArray[Any]) -> None:
    """Refuses a part of a sequence, as sequence parallelism deals it: what it attends to stands on another rank."""
    wrong = np.flatnonzero((columns == 0) & (positions != 0))
    if wrong.size:
        raise InputError(
            f"a sequence begins at position 0, and row {int(rows[wrong[0]])} begins at {int(positions[wrong[0]])}: "
            "the tokens before it are missing, as with sequence or context parallelism; give whole sequences, by "
            "setting its size to 1, or count positions from 0"
        )


def _integers(name: str, values: ArrayLike) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise InputError(f"{name} holds integers, got {array.dtype}; convert it")
    return array


def _real(name: str, values: ArrayLike, shape: tuple[int, ...]) -> BoolArray:
    array = np.asarray(values)
    if array.shape != shape:
        raise InputError(f"{name} has the shape of ids, {shape}, got {array.shape}; give one entry per token")
    real: BoolArray = np.not_equal(array, 0)
    return real
