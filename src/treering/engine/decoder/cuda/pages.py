"""Page allocator with prefix sharing: prompts with a common beginning share pages of keys and values.

A full page of a prompt is identified by the page before it and its own 16 tokens, so prompts with a common beginning
share their pages, and find them in the cache until they are evicted.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from treering.errors import InputError
from treering.types import TokenIds

PAGE_SLOTS = 16
"""Slots of a page."""

_ROOT = -1
_PageKey = tuple[int, bytes]


class PageAllocator:
    """Pages 0 to num_pages - 1: free, in use, or cached without readers for the next prompt with their tokens.

    Cached pages are evicted oldest first, and never before the pages that continue them.

    Example: of 8 pages a prompt of 40 tokens takes three. Once they are computed, a prompt of 50 with the same first 32
    tokens takes two more: `allocate_prompt` gives it the first two of the other's, and `num_computed` is 32.
    """

    def __init__(self, num_pages: int) -> None:
        """All pages are free."""
        if num_pages < 1:
            raise InputError(f"a cache has at least one page, got {num_pages}; raise max_tokens")
        self._free = list(reversed(range(num_pages)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # cached without readers, next to evict first
        self._num_readers = [0] * num_pages
        self._num_computed = [0] * num_pages
        self._keys: list[_PageKey | None] = [None] * num_pages
        self._by_key: dict[_PageKey, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could give, cached ones included."""
        return len(self._free) + len(self._cached)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Private pages, or None if there are too few."""
        if num_pages > self.num_free:
            return None
        return [self._allocate_page() for _ in range(num_pages)]

    def allocate_prompt(self, tokens: TokenIds) -> list[int] | None:
        """Pages for a prompt, shared where its beginning is known; None if there are too few for the rest.

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
        for place in range(len(known), tokens.size // PAGE_SLOTS):
            self._register(pages[place], _page_key(pages, tokens, place))
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Releases pages from `allocate` or `allocate_prompt`; full pages of prompts that are computed stay cached."""
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
        """Leading tokens of these pages whose keys and values are computed."""
        total = 0
        for page in pages:
            total += self._num_computed[page]
            if self._num_computed[page] < PAGE_SLOTS:
                break
        return total

    def set_computed(self, pages: Sequence[int], num_tokens: int) -> None:
        """Marks the first `num_tokens` of these pages as computed, or computed before anything reads them."""
        for place, page in enumerate(pages[: -(-num_tokens // PAGE_SLOTS)]):
            there = min(num_tokens - place * PAGE_SLOTS, PAGE_SLOTS)
            self._num_computed[page] = max(self._num_computed[page], there)

    def invalidate(self) -> None:
        """Marks all pages as not computed, after a weight update. Shared pages stay shared."""
        self._num_computed = [0] * len(self._num_computed)

    def _shared_prefix(self, tokens: TokenIds) -> list[int]:
        pages: list[int] = []
        for place in range(tokens.size // PAGE_SLOTS):
            page = self._by_key.get(_page_key(pages, tokens, place))
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

    def _register(self, page: int, name: _PageKey) -> None:
        self._keys[page], self._by_key[name] = name, page

    def _release(self, page: int) -> None:
        name, self._keys[page] = self._keys[page], None
        if name is not None:
            del self._by_key[name]
        self._num_computed[page] = 0
        self._free.append(page)


def _page_key(pages: Sequence[int], tokens: TokenIds, place: int) -> _PageKey:
    before = pages[place - 1] if place else _ROOT
    return before, np.ascontiguousarray(tokens[place * PAGE_SLOTS : (place + 1) * PAGE_SLOTS], np.int32).tobytes()
