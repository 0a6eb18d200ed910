"""The index tensors of the kernels for one layout and window, on its device: built once, shared by all layers.

N query rows   K keys
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treering.arrays import BoolArray, Int64Array
from treering.attention.blocks import BlockPairs, find_block_pairs
from treering.attention.layout import TreeLayout
from treering.attention.to_device import to_device
from treering.attention.triton.tiles import TileSize

DIRECT = -1
"""The slot of an item that writes its result directly to the output."""


class WorkList(NamedTuple):
    """Items that together visit every pair once.

    Attributes:
        items: int32 [I, 6]: an item's own block; where in `visits` its unmasked blocks start and stop; the same of its
            masked ones; and the slot that takes its partial sum, `DIRECT` for none.
        visits: int32 [P + 1], the other blocks of the pairs; plus one, never visited, so that prefetching is safe.
        splits: int32 [B, 3], of each block that several items share: its number, its first slot and one past its last.
        num_slots: S.
    """

    items: Tensor
    visits: Tensor
    splits: Tensor
    num_slots: int


def work_by_query(pairs: BlockPairs, device: torch.device) -> WorkList:
    """One item per query block, which visits key blocks.

    Example: a prompt and two responses of one block each are the items of blocks 1, 2 and 0, with two visits, two and
    one.
    """
    own, other = pairs.query_block, pairs.key_block
    return _listed(own, other, pairs.is_full, np.ones(pairs.num_query_blocks, np.int64), device)


def work_by_key(pairs: BlockPairs, max_visits: int, device: torch.device) -> WorkList:
    """Items of key blocks, which visit query blocks, at most `max_visits` each.

    All queries see a prompt's keys, so with one program per key block most of a device would wait for a few programs.
    Several programs share such a block and write partial sums to slots, which are then added in order.

    Example: a key block with 10 visits and at most 4 is three items, of 3, 3 and 4 visits.
    """
    own, other = pairs.key_block, pairs.query_block
    num_visits = np.bincount(own, minlength=pairs.num_key_blocks)
    return _listed(own, other, pairs.is_full, np.maximum(1, -(-num_visits // max_visits)), device)


def _listed(
    own: Int64Array, other: Int64Array, is_full: BoolArray, num_items: Int64Array, device: torch.device
) -> WorkList:
    """The visits of each own block, in so many items."""
    order = np.lexsort((other, ~is_full, own))
    visits = np.append(other[order], 0)
    count = np.bincount(own, minlength=num_items.size)
    middle = np.cumsum(count) - count + np.bincount(own[is_full], minlength=num_items.size)
    block = np.repeat(np.arange(num_items.size), num_items)
    place = np.arange(block.size) - np.repeat(np.cumsum(num_items) - num_items, num_items)
    base = (np.cumsum(count) - count)[block]
    start, stop = (base + (place + more) * count[block] // num_items[block] for more in (0, 1))
    is_split = num_items[block] > 1
    slot = np.where(is_split, np.cumsum(is_split) - 1, DIRECT)
    middle = np.clip(middle[block], start, stop)
    items = np.stack([block, start, middle, middle, stop, slot], 1)
    heaviest_first = np.argsort(start - stop, kind="stable")
    shared = np.flatnonzero(num_items > 1)
    last_slot = np.cumsum(num_items[shared])
    splits = np.stack([shared, last_slot - num_items[shared], last_slot], 1)
    tensors = [to_device(array.astype(np.int32), device) for array in (items[heaviest_first], visits, splits)]
    return WorkList(tensors[0], tensors[1], tensors[2], int(is_split.sum()))


NUM_PROGRAMS = 512
"""Target number of programs of the key gradient: about four per multiprocessor of a large device."""

MIN_TILES = 64
"""Fewest tile products per partial sum: writing and adding one takes as long as two or three products."""


class Tables:
    """Which rows see which key, as int32 tensors, and the work lists derived from them.

    Attributes:
        first: int32 [K], first row that sees a key.
        stop: int32 [K], one past the last row.
        limit: int32 [K], first position at which the window hides a key.
        position: int32 [N], of the query rows.
        has_window: whether `limit` and `position` are used.
    """

    def __init__(self, layout: TreeLayout, window: int | None) -> None:
        self._sight = layout.joined_sight()
        self._position = layout.sight.position
        self._window = layout.effective_window(window)
        self._device = layout.device
        self._works: dict[tuple[object, ...], WorkList] = {}
        self.has_window = self._window is not None
        self.first, self.stop, self.limit, self.position = (
            to_device(array.astype(np.int32), self._device)
            for array in (*self._sight[:2], self._sight.position + (self._window or 0), self._position)
        )

    @classmethod
    def of(cls, layout: TreeLayout, window: int | None) -> "Tables":
        """The tables of a layout under a window, built on first use."""
        window = layout.effective_window(window)
        return layout.once(f"triton tables, window {window}", lambda: cls(layout, window))

    def by_query(self, tile: TileSize) -> WorkList:
        """Work list whose programs each own a block of queries."""
        return self._once((tile,), lambda: work_by_query(self._pairs(tile), self._device))

    def by_key(self, tile: TileSize, *, num_heads: int, num_key_heads: int) -> WorkList:
        """Work list whose programs each own a block of keys, or share one; see `work_by_key`.

        The work of all key heads is split into about `NUM_PROGRAMS` equal programs.
        """

        def cut() -> WorkList:
            pairs = self._pairs(tile)
            least = -(-MIN_TILES * num_key_heads // num_heads)
            even = -(-pairs.key_block.size * num_key_heads // NUM_PROGRAMS)
            return work_by_key(pairs, max(least, even), self._device)

        return self._once((tile, num_heads, num_key_heads), cut)

    def _once(self, key: tuple[object, ...], make: Callable[[], WorkList]) -> WorkList:
        if key not in self._works:
            self._works[key] = make()
        return self._works[key]

    def _pairs(self, tile: TileSize) -> BlockPairs:
        sizes = {"query_size": tile.queries, "key_size": tile.keys}
        return find_block_pairs(self._sight, self._position, **sizes, window=self._window)
