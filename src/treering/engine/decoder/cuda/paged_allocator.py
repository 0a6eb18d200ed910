"""A paged arena: contiguous spans of addresses, mapped by a page table to pages anywhere in memory.

Every 16 addresses are a page; spans of prompts with a common beginning share pages. There are four times as many
addresses as slots, so that a long span finds a contiguous range.
"""

import numpy as np
from numpy.typing import NDArray

from treering.engine.decoder.cuda.pages import PAGE_SLOTS, PageAllocator
from treering.engine.kv_cache.allocator import KVAllocator, SpanAllocator
from treering.types import TokenIds

ADDRESSES_PER_SLOT = 4

SPARE_PAGES = 2
"""Extra pages for the partly used last pages of two spans, so that whatever fits into the slots fits into pages."""


class PagedAllocator(KVAllocator):
    """An arena of pages, with a page table.

    Attributes:
        table: int32 [P], the page of each 16 addresses; address a is slot `table[a // 16] * 16 + a % 16`.
        pages: the pages.

    Example: with 64 slots, `allocate(20)` gives address 0 with two pages, and `allocate(5)` gives address 32 with one.
    """

    def __init__(self, num_slots: int) -> None:
        """All slots are free; addresses outside spans map to the slot of the same index, modulo the number of slots."""
        num_pages = -(-num_slots // PAGE_SLOTS) + SPARE_PAGES
        num_ranges = ADDRESSES_PER_SLOT * num_pages
        self.pages = PageAllocator(num_pages)
        self.table: NDArray[np.int32] = np.arange(num_ranges, dtype=np.int32) % num_pages
        self._ranges = SpanAllocator(num_ranges)
        self._pages_of: dict[int, list[int]] = {}
        self._changed: tuple[int, int] | None = (0, num_ranges)

    @property
    def num_free(self) -> int:
        """Slots of the pages that are free or only cached."""
        return self.pages.num_free * PAGE_SLOTS

    def allocate(self, length: int) -> int | None:
        """See `KVAllocator.allocate`; returns an address."""
        assert length >= 1
        return self._map_pages(self.pages.allocate(-(-length // PAGE_SLOTS)))

    def allocate_prompt(self, tokens: TokenIds) -> int | None:
        """See `KVAllocator.allocate_prompt`; shares cached pages that hold the beginning of these tokens."""
        return self._map_pages(self.pages.allocate_prompt(tokens))

    def shrink(self, start: int, length: int) -> None:
        """See `KVAllocator.shrink`; keeps the page of the last slot whole."""
        pages, num_kept = self._pages_of[start], -(-length // PAGE_SLOTS)
        self._ranges.shrink(start // PAGE_SLOTS, num_kept)
        self.pages.free(pages[num_kept:])
        self._pages_of[start] = pages[:num_kept]

    def free(self, start: int) -> None:
        """See `KVAllocator.free`."""
        self._ranges.free(start // PAGE_SLOTS)
        self.pages.free(self._pages_of.pop(start))

    def cached_prompts(self) -> list[tuple[TokenIds, int]]:
        """None: prompts that begin alike share their pages by themselves."""
        return []

    def note_use(self, start: int) -> None:
        """Nothing to note without cached spans."""

    def num_computed(self, start: int) -> int:
        """See `KVAllocator.num_computed`; counts what other spans computed of shared pages."""
        return self.pages.num_computed(self._pages_of[start])

    def set_computed(self, start: int, num_tokens: int) -> None:
        """See `KVAllocator.set_computed`."""
        self.pages.set_computed(self._pages_of[start], num_tokens)

    def invalidate(self) -> None:
        """See `KVAllocator.invalidate`."""
        self.pages.invalidate()

    def pop_changed(self) -> tuple[int, int] | None:
        """Range (first, end) of `table` entries changed since the last call; None if there are none."""
        changed, self._changed = self._changed, None
        return changed

    def _map_pages(self, pages: list[int] | None) -> int | None:
        if pages is None:
            return None
        first = self._ranges.allocate(len(pages))
        if first is None:
            self.pages.free(pages)
            return None
        self.table[first : first + len(pages)] = pages
        start, end = self._changed or (first, first)
        self._changed = min(start, first), max(end, first + len(pages))
        self._pages_of[first * PAGE_SLOTS] = pages
        return first * PAGE_SLOTS
