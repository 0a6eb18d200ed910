"""What FlashAttention-4's kernels read of a forest: lists of blocks for each side, and the ranges of rows of each key.

N rows   K keys, ancestors' and own
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from treering.arrays import Int64Array
from treering.attention.blocks import find_block_pairs
from treering.attention.layout import TreeLayout
from treering.attention.to_device import to_device


class FlashTables(NamedTuple):
    """What the kernels read of a layout under a window, in lists, as the operations take them and compilers read them.

    Attributes:
        ranges: int32 arrays that the mask function reads: `first` and `stop` of each key; under a window also `limit`
            of each key and `position` of each row. The kernels read them up to the end of the last block, so they are
            padded: no row sees a key of the padding.
        by_query: for the forward, the blocks of keys of each block of rows: see `BlockPairs.lists`. The mask function
            is not called in full ones.
        by_key: for the backward, the blocks of rows of each block of keys.
        block_size: rows and keys of a block.
    """

    ranges: list[Tensor]
    by_query: list[Tensor]
    by_key: list[Tensor]
    block_size: list[int]

    @classmethod
    def of(cls, layout: TreeLayout, window: int | None, block_size: tuple[int, int]) -> "FlashTables":
        """Those of a layout, made once per window and block size, in O(N + K + pairs of blocks) on the host.

        Example: a prompt of 128 tokens and two responses of 128 in blocks of 128 have the full pairs (1, 0) and (2, 0),
        and three masked ones on the diagonal.
        """
        window = layout.effective_window(window)
        return layout.once(f"flash tables, window {window}, {block_size}", lambda: _make(layout, window, block_size))


def _make(layout: TreeLayout, window: int | None, block_size: tuple[int, int]) -> FlashTables:
    sight, position, device = layout.joined_sight(), layout.sight.position, layout.device
    pairs = find_block_pairs(sight, position, query_size=block_size[0], key_size=block_size[1], window=window)
    ranges = [(sight.first, block_size[1]), (sight.stop, block_size[1])]
    if window is not None:
        ranges += [(sight.position + window, block_size[1]), (position, block_size[0])]
    return FlashTables(
        ranges=[to_device(_padded(array, size), device) for array, size in ranges],
        by_query=pairs.lists(device),
        by_key=pairs.lists(device, is_by_key=True),
        block_size=list(block_size),
    )


def _padded(array: Int64Array, size: int) -> np.ndarray:
    """The array in int32 with zeros up to a multiple of `size`."""
    return np.pad(array.astype(np.int32), (0, -array.size % size))
