"""What FlashAttention-4's kernels read of a forest: lists of blocks for each side, and the ranges of rows of each key.

N rows   K keys, ancestors' and own   R blocks of one side   C the longest list of blocks
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treering.arrays import BoolArray, Int64Array
from treering.attention.blocks import BlockPairs, find_block_pairs
from treering.attention.joined import joined_sight
from treering.attention.layout import TreeLayout
from treering.attention.to_device import to_device


class Lists(NamedTuple):
    """For each block of one side how many blocks of the other it visits, [1, 1, R], and which, [1, 1, R, C]; int32."""

    lengths: Tensor
    blocks: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockLists:
    """The blocks that one side visits.

    Attributes:
        masked: those in which the mask function decides.
        full: those in which every pair is visible; the mask function is not called.
    """

    masked: Lists
    full: Lists


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashTables:
    """What the kernels read of a layout under a window.

    Attributes:
        by_query: for the forward: the blocks of keys of each block of rows.
        by_key: for the backward: the blocks of rows of each block of keys.
        ranges: int32 arrays that the mask function reads: `first` and `stop` of each key; under a window also `limit`
            of each key and `position` of each row. The kernels read them up to the end of the last block, so they are
            padded: no row sees a key of the padding.
        block_size: rows and keys of a block.
    """

    by_query: BlockLists
    by_key: BlockLists
    ranges: tuple[Tensor, ...]
    block_size: tuple[int, int]


class FlatTables(NamedTuple):
    """The same as lists of tensors, as the operations take them and compilers read them.

    Attributes:
        ranges: see `FlashTables`.
        by_query: lengths and blocks of the masked lists, then of the full ones.
        by_key: the same.
        block_size: rows and keys of a block.
    """

    ranges: list[Tensor]
    by_query: list[Tensor]
    by_key: list[Tensor]
    block_size: list[int]

    @classmethod
    def of(cls, layout: TreeLayout, window: int | None, block_size: tuple[int, int]) -> "FlatTables":
        """Those of a layout, made once per window and block size."""
        window = layout.effective_window(window)

        def make() -> FlatTables:
            tables = flash_tables(layout, window, block_size)
            by_query, by_key = ([*lists.masked, *lists.full] for lists in (tables.by_query, tables.by_key))
            return cls(list(tables.ranges), by_query, by_key, list(block_size))

        return layout.once(f"flash tables, window {window}, blocks of {block_size}", make)


def flash_tables(layout: TreeLayout, window: int | None, block_size: tuple[int, int]) -> FlashTables:
    """The tables of a layout, in O(N + K + pairs of blocks) on the host.

    Example: a prompt of 128 tokens and two responses of 128 in blocks of 128 have the full pairs (1, 0) and (2, 0), and
    three masked ones on the diagonal.
    """
    rows_per_block, keys_per_block = block_size
    sight, position = joined_sight(layout), layout.sight.position
    pairs = find_block_pairs(sight, position, query_size=rows_per_block, key_size=keys_per_block, window=window)
    num_rows, num_keys = position.size, sight.first.size
    # Short blocks at the ends stay masked: the padding must not be seen.
    is_full = (
        pairs.is_full
        & ((pairs.query_block + 1) * rows_per_block <= num_rows)
        & ((pairs.key_block + 1) * keys_per_block <= num_keys)
    )
    arrays = [_padded(array, keys_per_block, fill=0) for array in (sight.first, sight.stop)]
    if window is not None:
        arrays += [_padded(sight.position + window, keys_per_block, fill=0), _padded(position, rows_per_block, fill=0)]
    device = layout.device
    return FlashTables(
        by_query=_block_lists(pairs, is_full, device, is_by_key=False),
        by_key=_block_lists(pairs, is_full, device, is_by_key=True),
        ranges=tuple(to_device(array, device) for array in arrays),
        block_size=block_size,
    )


def _block_lists(pairs: BlockPairs, is_full: BoolArray, device: torch.device, *, is_by_key: bool) -> BlockLists:
    own, other = (pairs.key_block, pairs.query_block) if is_by_key else (pairs.query_block, pairs.key_block)
    num_blocks = pairs.num_key_blocks if is_by_key else pairs.num_query_blocks
    order = np.lexsort((other, own))
    own, other, is_full = own[order], other[order], is_full[order]
    return BlockLists(
        masked=_lists(own[~is_full], other[~is_full], num_blocks, device),
        full=_lists(own[is_full], other[is_full], num_blocks, device),
    )


def _lists(own: Int64Array, other: Int64Array, num_blocks: int, device: torch.device) -> Lists:
    """Lists from pairs in the order of `own`; a list has at least one place, which need not be read."""
    lengths = np.bincount(own, minlength=num_blocks)
    blocks = np.zeros((num_blocks, max(1, int(lengths.max(initial=0)))), np.int32)
    blocks[own, np.arange(own.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)] = other
    return Lists(*(to_device(array.astype(np.int32), device)[None, None] for array in (lengths, blocks)))


def _padded(array: Int64Array, size: int, *, fill: int) -> np.ndarray:
    """The array in int32 up to a multiple of `size`."""
    return np.pad(array.astype(np.int32), (0, -array.size % size), constant_values=fill)
