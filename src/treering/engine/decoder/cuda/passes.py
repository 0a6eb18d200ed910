"""The tables of a pass for the kernels: int64 columns per token, and tiles of tokens of one row.

Tokens of a row share a tile, so that their common keys are read once for all of them.

    T tokens of a pass   I tiles
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import Int64Array
from treering.engine.batch.token_batch import TokenBatch

ROWS_OF_TILES = (16, 64)
"""Queries of a tile, tokens times heads: the minimum of the matrix units, and the most that fits with the keys."""

TOKEN_COLUMNS = 6
"""token, position, slot, num_own, tree_offset, tree_bits"""

TILE_COLUMNS = 6
"""first token, number of tokens, prefix_start, num_prefix, own_start, num_read"""


class PassTables(NamedTuple):
    """The inputs of a pass besides weights."""

    tokens: Int64Array  # [6, T], see TOKEN_COLUMNS; a tree begins tree_offset slots after the own span's start
    tiles: Int64Array  # [I, 6], see TILE_COLUMNS; some token sees the first num_read slots of the own span
    rows: int  # queries of a tile, of ROWS_OF_TILES


def plan_tables(batch: TokenBatch, num_groups: int) -> PassTables:
    """The tables of a pass with `num_groups` query heads per key head, at most 64.

    Example: with 4 heads per key head, a row of 3 tokens and one of 1 are two tiles of 16 queries. A chunk of 100
    tokens, more than the 4 that fit there, makes all tiles 64 queries and takes 7 of them.
    """
    starts, lengths = _runs(batch)
    rows = next((rows for rows in ROWS_OF_TILES if rows // num_groups >= lengths.max(initial=1)), ROWS_OF_TILES[-1])
    most = rows // num_groups
    num_tiles = -(-lengths // most)
    place = np.arange(num_tiles.sum()) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    first = np.repeat(starts, num_tiles) + place * most
    offset = np.where(batch.tree_bits != 0, batch.tree_start - batch.own_start, 0)
    num_read = np.maximum(batch.num_own, np.where(batch.tree_bits != 0, offset + _length(batch.tree_bits), 0))
    tiles = [
        first,
        np.minimum(most, np.repeat(starts + lengths, num_tiles) - first),
        batch.prefix_start[first],
        batch.num_prefix[first],
        batch.own_start[first],
        np.maximum.reduceat(num_read, first) if first.size else first,
    ]
    columns = [batch.tokens, batch.positions, batch.slots, batch.num_own, offset, batch.tree_bits]
    return PassTables(np.stack(columns), np.stack(tiles, 1), rows)


def _runs(batch: TokenBatch) -> tuple[Int64Array, Int64Array]:
    """First tokens and lengths of the runs of tokens with the same spans."""
    spans = np.stack([batch.prefix_start, batch.num_prefix, batch.own_start])
    is_start = np.ones(batch.num_tokens, bool)
    is_start[1:] = (spans[:, 1:] != spans[:, :-1]).any(0)
    starts = np.flatnonzero(is_start)
    return starts, np.diff(starts, append=batch.num_tokens)


def _length(bits: Int64Array) -> Int64Array:
    """Index of the highest set bit, from 1; may be one too high for long runs of set bits, by rounding."""
    return np.frexp(bits.view(np.uint64).astype(np.float64))[1].astype(np.int64)


def bucket(count: int) -> int:
    """Rounds `count` >= 1 up to the size of a captured pass: powers of two up to 64, then multiples of 64.

    Example: 1, 2, 3, 64, 65 and 130 become 1, 2, 4, 64, 128 and 192.
    """
    return 1 << (count - 1).bit_length() if count <= 64 else -(-count // 64) * 64
