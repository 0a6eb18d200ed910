"""Spans of slots as an engine asks for them, over pages that lie anywhere: one table from the former to the latter.

A span is a range of addresses, and every 16 of them are a page; two spans of prompts with a common beginning have pages
in common. Addresses are four times as many as slots, so that a long span finds its range. Knows addresses and pages;
knows nothing of what uses them.
"""

import numpy as np
from numpy.typing import NDArray

from treering.engine.decoder.cuda.pages import PAGE_SLOTS, Pages
from treering.engine.kv_cache.allocator import Arena, SpanAllocator
from treering.types import TokenIds

ADDRESSES_PER_SLOT = 4

SPARE_PAGES = 2
"""The last pages of two spans may be used in part: with these more, what fits into the slots fits into the pages."""


class PagedAllocator(Arena):
    """An arena whose memory is pages, with `table` from addresses to them.

    Attributes:
        table: int32 [P], the page behind each 16 addresses; address a is slot `table[a // 16] * 16 + a % 16`.
        pages: the pages.

    Example: with 64 slots, `take(20)` gives address 0 with two pages, and `take(5)` gives address 32 with one.
    """

    def __init__(self, num_slots: int) -> None:
        """Every slot is free, and addresses that no span has are slots of the same number as far as there are any."""
        num_pages = -(-num_slots // PAGE_SLOTS) + SPARE_PAGES
        num_ranges = ADDRESSES_PER_SLOT * num_pages
        self.pages = Pages(num_pages)
        self.table: NDArray[np.int32] = np.arange(num_ranges, dtype=np.int32) % num_pages
        self._ranges = SpanAllocator(num_ranges)
        self._pages_of: dict[int, list[int]] = {}
        self._changed: tuple[int, int] | None = (0, num_ranges)

    @property
    def num_free(self) -> int:
        """Slots of the pages that are free or only kept."""
        return self.pages.num_free * PAGE_SLOTS

    def take(self, length: int) -> int | None:
        """See `Arena.take`; an address."""
        assert length >= 1
        return self._place(self.pages.take(-(-length // PAGE_SLOTS)))

    def take_known(self, tokens: TokenIds) -> int | None:
        """See `Arena.take_known`; pages that hold the beginning of these tokens are shared."""
        return self._place(self.pages.take_known(tokens))

    def give_back(self, start: int) -> None:
        """See `Arena.give_back`."""
        self._ranges.give_back(start // PAGE_SLOTS)
        self.pages.give_back(self._pages_of.pop(start))

    def num_computed(self, start: int) -> int:
        """See `Arena.num_computed`; what another span has computed of shared pages counts."""
        return self.pages.num_computed(self._pages_of[start])

    def set_computed(self, start: int, num_tokens: int) -> None:
        """See `Arena.set_computed`."""
        self.pages.set_computed(self._pages_of[start], num_tokens)

    def forget_values(self) -> None:
        """See `Arena.forget_values`."""
        self.pages.forget_values()

    def changed(self) -> tuple[int, int] | None:
        """First and one past the last entry of `table` that changed since the last call; None for none."""
        changed, self._changed = self._changed, None
        return changed

    def _place(self, pages: list[int] | None) -> int | None:
        if pages is None:
            return None
        first = self._ranges.take(len(pages))
        if first is None:
            self.pages.give_back(pages)
            return None
        self.table[first : first + len(pages)] = pages
        start, end = self._changed or (first, first)
        self._changed = min(start, first), max(end, first + len(pages))
        self._pages_of[first * PAGE_SLOTS] = pages
        return first * PAGE_SLOTS
