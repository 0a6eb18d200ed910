"""Tiles by head size and dtype, and the index tensors of a layout, for the kernels of the `triton` backend.

Tile sizes follow from what fits: accumulators in registers, tiles in shared memory. Index tensors are built once for a
layout and a window, on its device, and shared by all layers.

N query rows   K keys
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treering.arrays import BoolArray, Int64Array
from treering.attention.blocks import BlockPairs, find_block_pairs
from treering.attention.layout import TreeLayout, to_device

MAX_HEAD_SIZES = MappingProxyType({torch.bfloat16: 256, torch.float16: 256, torch.float32: 128})
"""The largest head size whose tiles fit into a multiprocessor, by supported dtype."""

MIN_PADDED_SIZE = 16
"""Fewest columns that matrix units multiply."""


class TileSize(NamedTuple):
    """A block of query rows against a block of keys."""

    queries: int
    keys: int


class Tiles(NamedTuple):
    """Tiles of the three kernels.

    Attributes:
        forward: tile of the kernel that computes outputs.
        query_gradient: tile of the kernel that sums over keys.
        key_gradient: tile of the kernel that sums over queries.
    """

    forward: TileSize
    query_gradient: TileSize
    key_gradient: TileSize


class LaunchConfig(NamedTuple):
    """Warps of a program and stages of its pipeline."""

    num_warps: int
    num_stages: int


def padded_size(head_size: int) -> int:
    """Return the columns that a head takes in a tile: a power of two. Head sizes of 80 and 96 take 128."""
    return max(MIN_PADDED_SIZE, 1 << (head_size - 1).bit_length())


def choose_tiles(head_size: int, dtype: torch.dtype) -> Tiles:
    """Return the tiles for a head size and a dtype.

    The accumulator of the query tile is the largest array in registers: 128 rows of 128 columns in float32 take a
    quarter of them. The key gradient has two accumulators, so it takes fewer query rows per visit. Above 128 columns
    rows are halved. A float32 tile is multiplied as three tf32 tiles.

    Example: heads of 128 in bfloat16 are computed forward in tiles of 128 queries and 64 keys.
    """
    if dtype in (torch.float32, torch.float64):
        size = 64 if padded_size(head_size) <= 64 else 32
        return Tiles(forward=TileSize(64, 32), query_gradient=TileSize(64, 32), key_gradient=TileSize(32, size))
    if padded_size(head_size) <= 128:
        return Tiles(forward=TileSize(128, 64), query_gradient=TileSize(128, 64), key_gradient=TileSize(64, 128))
    return Tiles(forward=TileSize(64, 64), query_gradient=TileSize(64, 64), key_gradient=TileSize(32, 64))


def launches(kernel: str, head_size: int, dtype: torch.dtype) -> tuple[LaunchConfig, ...]:
    """Return the launch options to time; the first is the default without timing.

    Example: launches("forward", 128, torch.bfloat16)[0] is 8 warps and 3 stages.
    """
    if dtype in (torch.float32, torch.float64):
        return (LaunchConfig(4, 2), LaunchConfig(8, 2))
    return _LAUNCHES[kernel, min(2, padded_size(head_size) // 128)]


_LAUNCHES = MappingProxyType(
    {
        ("forward", 0): (LaunchConfig(4, 3), LaunchConfig(8, 3), LaunchConfig(4, 4)),
        ("forward", 1): (LaunchConfig(8, 3), LaunchConfig(8, 2)),
        ("forward", 2): (LaunchConfig(8, 2), LaunchConfig(4, 2)),
        ("query_gradient", 0): (LaunchConfig(8, 3), LaunchConfig(4, 3)),
        ("query_gradient", 1): (LaunchConfig(8, 3), LaunchConfig(8, 2)),
        ("query_gradient", 2): (LaunchConfig(8, 2), LaunchConfig(4, 2)),
        ("key_gradient", 0): (LaunchConfig(8, 3), LaunchConfig(8, 2)),
        ("key_gradient", 1): (LaunchConfig(8, 2), LaunchConfig(8, 3)),
        ("key_gradient", 2): (LaunchConfig(8, 2), LaunchConfig(8, 1)),
    }
)
"""By kernel, and by padded head size: below 128 columns, 128, more.

Chosen from the compiler's reports for compute capability 9.0: few or no spilled registers, and less shared memory than
a multiprocessor has.
"""


DIRECT = -1
"""Slot of an item that writes its result directly to the output."""


class WorkList(NamedTuple):
    """Work items that together visit every pair once.

    Attributes:
        items: int32 [I, 6]: an item's own block, start and stop of its unmasked blocks in `visits`, start and stop of
            its masked ones, and the slot of its partial sum, `DIRECT` for none.
        visits: int32 [P + 1], the other blocks of the pairs, and a last entry that only makes prefetching safe.
        splits: int32 [B, 3], for each block that several items share: its index, its first slot and one past its last.
        num_slots: S.
    """

    items: Tensor
    visits: Tensor
    splits: Tensor
    num_slots: int


def work_by_query(pairs: BlockPairs, device: torch.device) -> WorkList:
    """Make one item per query block, which visits key blocks.

    Example: a prompt and two responses of one block each are the items of blocks 1, 2 and 0, with two visits, two and
    one.
    """
    own, other = pairs.query_block, pairs.key_block
    return _listed(own, other, pairs.is_full, np.ones(pairs.num_query_blocks, np.int64), device)


def work_by_key(pairs: BlockPairs, max_visits: int, device: torch.device) -> WorkList:
    """Make items of key blocks, which visit query blocks, at most `max_visits` each.

    All queries see a prompt's keys, so with one program per key block most of a device would wait for a few programs.
    Several programs share such a block and write partial sums to slots, which are then added in order.

    Example: a key block with 10 visits and at most 4 per item is three items, of 3, 3 and 4 visits.
    """
    own, other = pairs.key_block, pairs.query_block
    num_visits = np.bincount(own, minlength=pairs.num_key_blocks)
    return _listed(own, other, pairs.is_full, np.maximum(1, -(-num_visits // max_visits)), device)


def _listed(
    own: Int64Array, other: Int64Array, is_full: BoolArray, num_items: Int64Array, device: torch.device
) -> WorkList:
    """List the visits of each own block, divided among its `num_items`."""
    order = np.lexsort((other, ~is_full, own))
    visits = np.append(other[order], 0)
    count = np.bincount(own, minlength=num_items.size)
    middle = np.cumsum(count) - count + np.bincount(own[is_full], minlength=num_items.size)
    block = np.repeat(np.arange(num_items.size), num_items)
    index = np.arange(block.size) - np.repeat(np.cumsum(num_items) - num_items, num_items)
    base = (np.cumsum(count) - count)[block]
    start, stop = (base + (index + more) * count[block] // num_items[block] for more in (0, 1))
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
    """Query rows that see each key, as int32 tensors, and the work lists derived from them.

    Attributes:
        first: int32 [K], first row that sees a key.
        stop: int32 [K], one past the last row.
        limit: int32 [K], first position at which the window hides a key.
        position: int32 [N], position of each query row.
        has_window: whether `limit` and `position` are used.
    """

    def __init__(self, layout: TreeLayout, window: int | None) -> None:
        self._ranges = layout.joined_ranges()
        self._position = layout.ranges.position
        self._window = layout.effective_window(window)
        self._device = layout.device
        self._works: dict[tuple[object, ...], WorkList] = {}
        self.has_window = self._window is not None
        self.first, self.stop, self.limit, self.position = (
            to_device(array.astype(np.int32), self._device)
            for array in (*self._ranges[:2], self._ranges.position + (self._window or 0), self._position)
        )

    @classmethod
    def of(cls, layout: TreeLayout, window: int | None) -> "Tables":
        """Return the tables of a layout under a window, built on first use."""
        window = layout.effective_window(window)
        return layout.once(f"triton tables, window {window}", lambda: cls(layout, window))

    def by_query(self, tile: TileSize) -> WorkList:
        """Return the work list whose programs each own a block of queries."""
        return self._once((tile,), lambda: work_by_query(self._pairs(tile), self._device))

    def by_key(self, tile: TileSize, *, num_heads: int, num_key_heads: int) -> WorkList:
        """Return the work list whose programs each own a block of keys, or share one; see `work_by_key`.

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
        return find_block_pairs(self._ranges, self._position, **sizes, window=self._window)
