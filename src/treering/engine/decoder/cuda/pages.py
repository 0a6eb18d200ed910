"""Allocate a paged arena: a table maps spans of addresses to pages, which prompts with a common beginning share.

A full page of a prompt is identified by the page before it and its own 16 tokens, so prompts with a common beginning
share pages, and find them in the cache until they are evicted.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treering.engine.kv_cache import KVAllocator, SpanAllocator
from treering.errors import InputError
from treering.types import TokenIds

PAGE_SLOTS = 16
"""Slots of a page."""

ADDRESSES_PER_SLOT = 4


SPARE_PAGES = 2
"""Extra pages for the partly used last pages of two spans, so that anything that fits the slots fits the pages."""


_ROOT = -1
_PageKey = tuple[int, bytes]


class PageAllocator:
    """Pages 0 to num_pages - 1, each free, in use, or cached without readers for later prompts with the same tokens.

    Cached pages are evicted oldest first, and never before the pages that continue them.

    Example: a prompt of 40 tokens takes three of 8 pages. Once they are computed, a prompt of 50 tokens with the same
    first 32 takes two more: `allocate_prompt` reuses the first two pages, and `num_computed` is 32.
    """

    def __init__(self, num_pages: int) -> None:
        """Start with all pages free."""
        if num_pages < 1:
            raise InputError(f"a cache needs at least one page, got {num_pages}; raise max_tokens")
        self._free = list(reversed(range(num_pages)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # cached without readers, next to evict first
        self._num_readers = [0] * num_pages
        self._num_computed = [0] * num_pages
        self._keys: list[_PageKey | None] = [None] * num_pages
        self._by_key: dict[_PageKey, int] = {}

    @property
    def num_free(self) -> int:
        """Number of pages that `allocate` can give, cached ones included."""
        return len(self._free) + len(self._cached)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Return private pages, or None if too few are free."""
        if num_pages > self.num_free:
            return None
        return [self._allocate_page() for _ in range(num_pages)]

    def allocate_prompt(self, tokens: TokenIds) -> list[int] | None:
        """Return pages for a prompt, shared where its beginning is known; None if too few are free for the rest.

        Args:
            tokens: int32 [N], N >= 1.
        """
        known = self._shared_prefix(tokens)
        num_new = -(-tokens.size // PAGE_SLOTS) - len(known)
        if num_new > self.num_free - sum(page in self._cached for page in known):
            return None
        for page in known:
            self._cached.pop(page, None)
            self._num_readers[page] += 1
        pages = known + [self._allocate_page() for _ in range(num_new)]
        for index in range(len(known), tokens.size // PAGE_SLOTS):
            page, key = pages[index], _page_key(pages, tokens, index)
            self._keys[page], self._by_key[key] = key, page
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Release pages from `allocate` or `allocate_prompt`; full, computed pages of prompts stay cached."""
        for page in reversed(pages):
            assert self._num_readers[page] > 0
            self._num_readers[page] -= 1
            if self._num_readers[page] > 0:
                continue
            if self._keys[page] is not None and self._num_computed[page] == PAGE_SLOTS:
                self._cached[page] = None
            else:
                self._release(page)

    def num_computed(self, pages: Sequence[int]) -> int:
        """Return the number of leading tokens of these pages whose keys and values are computed."""
        total = 0
        for page in pages:
            total += self._num_computed[page]
            if self._num_computed[page] < PAGE_SLOTS:
                break
        return total

    def set_computed(self, pages: Sequence[int], num_tokens: int) -> None:
        """Mark the first `num_tokens` of these pages as computed, at the latest when anything reads them."""
        for index, page in enumerate(pages[: -(-num_tokens // PAGE_SLOTS)]):
            there = min(num_tokens - index * PAGE_SLOTS, PAGE_SLOTS)
            self._num_computed[page] = max(self._num_computed[page], there)

    def invalidate(self) -> None:
        """Mark all pages as not computed, after a weight update; shared pages stay shared."""
        self._num_computed = [0] * len(self._num_computed)

    def _shared_prefix(self, tokens: TokenIds) -> list[int]:
        pages: list[int] = []
        for index in range(tokens.size // PAGE_SLOTS):
            page = self._by_key.get(_page_key(pages, tokens, index))
            if page is None:
                break
            pages.append(page)
        return pages

    def _allocate_page(self) -> int:
        if not self._free:
            self._release(self._cached.popitem(last=False)[0])
        page = self._free.pop()
        self._num_readers[page] = 1
        return page

    def _release(self, page: int) -> None:
        name, self._keys[page] = self._keys[page], None
        if name is not None:
            del self._by_key[name]
        self._num_computed[page] = 0
        self._free.append(page)


def _page_key(pages: Sequence[int], tokens: TokenIds, index: int) -> _PageKey:
    before = pages[index - 1] if index else _ROOT
    return before, np.ascontiguousarray(tokens[index * PAGE_SLOTS : (index + 1) * PAGE_SLOTS], np.int32).tobytes()


class PagedAllocator(KVAllocator):
    """Arena of pages with a page table.

    Attributes:
        table: int32 [P], the page of each 16 addresses; address a is slot `table[a // 16] * 16 + a % 16`.
        pages: the allocator of the pages.

    Example: with 64 slots, `allocate(20)` gives address 0 with two pages, and `allocate(5)` gives address 32 with one.
    """

    def __init__(self, num_slots: int) -> None:
        """Start with all slots free; addresses outside spans map to the slot of the same index, modulo their number."""
        num_pages = -(-num_slots // PAGE_SLOTS) + SPARE_PAGES
        num_ranges = ADDRESSES_PER_SLOT * num_pages
        self.pages = PageAllocator(num_pages)
        self.table: NDArray[np.int32] = np.arange(num_ranges, dtype=np.int32) % num_pages
        self._ranges = SpanAllocator(num_ranges)
        self._pages_of: dict[int, list[int]] = {}
        self._changed: tuple[int, int] | None = (0, num_ranges)

    @property
    def num_free(self) -> int:
        """Number of slots in pages that are free or only cached."""
        return self.pages.num_free * PAGE_SLOTS

    def allocate(self, length: int) -> int | None:
        """Return the address of a private span of `length` slots, or None if there is no space."""
        assert length >= 1
        return self._map_pages(self.pages.allocate(-(-length // PAGE_SLOTS)))

    def allocate_prompt(self, tokens: TokenIds) -> int | None:
        """Return the address of a prompt's span, whose beginning may share cached pages; None if there is no space."""
        return self._map_pages(self.pages.allocate_prompt(tokens))

    def shrink(self, start: int, length: int) -> None:
        """Keep the first `length` slots of a span and free the other pages."""
        pages, num_kept = self._pages_of[start], -(-length // PAGE_SLOTS)
        self._ranges.shrink(start // PAGE_SLOTS, num_kept)
        self.pages.free(pages[num_kept:])
        self._pages_of[start] = pages[:num_kept]

    def free(self, start: int) -> None:
        """Free a span; its full, computed prompt pages stay cached."""
        self._ranges.free(start // PAGE_SLOTS)
        self.pages.free(self._pages_of.pop(start))

    def cached_prompts(self) -> list[tuple[TokenIds, int]]:
        """Return an empty list: prompts with the same beginning share pages without copies."""
        return []

    def note_use(self, start: int) -> None:
        """Do nothing, because no spans are cached."""

    def num_computed(self, start: int) -> int:
        """Return the number of computed tokens of a span, including shared pages that other spans computed."""
        return self.pages.num_computed(self._pages_of[start])

    def set_computed(self, start: int, num_tokens: int) -> None:
        """Mark a span's first `num_tokens` as computed."""
        self.pages.set_computed(self._pages_of[start], num_tokens)

    def invalidate(self) -> None:
        """Mark all keys and values as not computed."""
        self.pages.invalidate()

    def pop_changed(self) -> tuple[int, int] | None:
        """Return the range (first, end) of `table` entries changed since the last call; None if there are none."""
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
