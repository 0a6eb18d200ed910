"""The index tensors of the kernels for one layout and window, on its device: built once, shared by all layers.

N query rows   K keys
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from treering.attention.blocks import BlockPairs, find_block_pairs
from treering.attention.joined import joined_sight
from treering.attention.layout import TreeLayout
from treering.attention.to_device import to_device
from treering.attention.triton.tiles import TileSize
from treering.attention.triton.work import WorkList, without_short_blocks, work_by_key, work_by_query

NUM_PROGRAMS = 512
"""Target number of programs of the key gradient: about four per multiprocessor of a large device."""

MIN_TILES = 64
"""Fewest tile products per partial sum: writing and adding one takes as long as two or three products."""


class WorkTables(NamedTuple):
    """`WorkList` on a device."""

    items: Tensor
    visits: Tensor
    splits: Tensor
    num_slots: int


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
        self._sight = joined_sight(layout)
        self._position = layout.sight.position
        self._window = layout.effective_window(window)
        self._device = layout.device
        self._works: dict[tuple[object, ...], WorkTables] = {}
        self.has_window = self._window is not None
        self.first, self.stop, self.limit, self.position = (
            self._on_device(array)
            for array in (*self._sight[:2], self._sight.position + (self._window or 0), self._position)
        )

    @classmethod
    def of(cls, layout: TreeLayout, window: int | None) -> "Tables":
        """The tables of a layout under a window, built on first use."""
        window = layout.effective_window(window)
        return layout.once(f"triton tables, window {window}", lambda: cls(layout, window))

    def by_query(self, tile: TileSize) -> WorkTables:
        """Work list whose programs each own a block of queries."""
        return self._once((tile,), lambda: work_by_query(self._pairs(tile)))

    def by_key(
        self, tile: TileSize, *, num_heads: int, num_key_heads: int, max_visits: int | None = None
    ) -> WorkTables:
        """Work list whose programs each own a block of keys, or share one; see `work_by_key`.

        With `max_visits` None, the work of all key heads is split into about `NUM_PROGRAMS` equal programs.
        """

        def cut() -> WorkList:
            pairs = self._pairs(tile)
            least = -(-MIN_TILES * num_key_heads // num_heads)
            even = -(-pairs.key_block.size * num_key_heads // NUM_PROGRAMS)
            return work_by_key(pairs, max_visits or max(least, even))

        return self._once((tile, num_heads, num_key_heads, max_visits), cut)

    def _once(self, key: tuple[object, ...], make: Callable[[], WorkList]) -> WorkTables:
        if key not in self._works:
            work = make()
            items, visits, splits = (self._on_device(array) for array in (work.items, work.visits, work.splits))
            self._works[key] = WorkTables(items=items, visits=visits, splits=splits, num_slots=work.num_slots)
        return self._works[key]

    def _pairs(self, tile: TileSize) -> BlockPairs:
        pairs = find_block_pairs(
            self._sight, self._position, query_size=tile.queries, key_size=tile.keys, window=self._window
        )
        return without_short_blocks(
            pairs,
            num_queries=self._position.size,
            num_keys=self._sight.first.size,
            query_size=tile.queries,
            key_size=tile.keys,
        )

    def _on_device(self, array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return to_device(array.astype(np.int32), self._device)
