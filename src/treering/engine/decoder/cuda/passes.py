"""A pass as the kernels read it: one column of int64 for each thing about a token, and tiles of tokens of one row.

Tokens of a row stand together in a tile, so that the keys that they share are read once for all of them. Knows numbers
of tokens, addresses and heads; knows nothing of tensors, models or devices.

    T tokens of a pass   I tiles
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import Int64Array
from treering.engine.batch.token_batch import TokenBatch

ROWS_OF_TILES = (16, 64)
"""Queries of a tile, tokens times heads: the fewest that matrix units take, and what still fits beside the keys."""

TOKEN_COLUMNS = 6
"""token, position, address, num_own, tree_offset, tree_bits"""

TILE_COLUMNS = 6
"""first token, number of tokens, prefix_start, num_prefix, own_start, num_read"""


class PassTables(NamedTuple):
    """What a pass reads besides weights."""

    tokens: Int64Array  # [6, T], see TOKEN_COLUMNS; a tree begins tree_offset addresses behind the own span's first
    tiles: Int64Array  # [I, 6], see TILE_COLUMNS; num_read addresses of the own span are seen by some token
    rows: int  # queries of a tile, of ROWS_OF_TILES


def plan_tables(batch: TokenBatch, num_groups: int) -> PassTables:
    """The tables of a pass whose key heads serve `num_groups` query heads each, 64 at most.

    Example: a row of 3 tokens and one of 1, with 4 heads to a key head, are two tiles of 16 rows; a chunk of 100
    tokens, which is longer than the 4 that those hold, makes all tiles 64 rows, and 7 of its own.
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
    """First tokens and lengths of the stretches that read the same spans."""
    spans = np.stack([batch.prefix_start, batch.num_prefix, batch.own_start])
    is_start = np.ones(batch.num_tokens, bool)
    is_start[1:] = (spans[:, 1:] != spans[:, :-1]).any(0)
    starts = np.flatnonzero(is_start)
    return starts, np.diff(starts, append=batch.num_tokens)


def _length(bits: Int64Array) -> Int64Array:
    """Number of the highest bit, from 1; one too many where the bits below it are all set and many."""
    return np.frexp(bits.view(np.uint64).astype(np.float64))[1].astype(np.int64)


def bucket(count: int) -> int:
    """The number that a captured pass has instead of `count` >= 1: powers of two up to 64, then multiples of 64.

    Example: 1, 2, 3, 64, 65 and 130 become 1, 2, 4, 64, 128 and 192.
    """
    return 1 << (count - 1).bit_length() if count <= 64 else -(-count // 64) * 64
