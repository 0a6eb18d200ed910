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
_Name = tuple[int, bytes]


class Pages:
    """Pages 0 to num_pages - 1: free, in use, or cached without readers for the next prompt with their tokens.

    Cached pages are evicted oldest first, and never before the pages that continue them.

    Example: of 8 pages a prompt of 40 tokens takes three. Once they are computed, a prompt of 50 with the same first 32
    tokens takes two more: `take_known` gives it the first two of the other's, and `num_computed` is 32.
    """

    def __init__(self, num_pages: int) -> None:
        """All pages are free."""
        if num_pages < 1:
            raise InputError(f"a cache has at least one page, got {num_pages}; raise max_tokens")
        self._free = list(reversed(range(num_pages)))
        self._kept: OrderedDict[int, None] = OrderedDict()  # cached without readers, next to evict first
        self._num_readers = [0] * num_pages
        self._num_computed = [0] * num_pages
        self._names: list[_Name | None] = [None] * num_pages
        self._by_name: dict[_Name, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that `take` could give, cached ones included."""
        return len(self._free) + len(self._kept)

    def take(self, num_pages: int) -> list[int] | None:
        """Private pages, or None if there are too few."""
        if num_pages > self.num_free:
            return None
        return [self._grab() for _ in range(num_pages)]

    def take_known(self, tokens: TokenIds) -> list[int] | None:
        """Pages for a prompt, shared where its beginning is known; None if there are too few for the rest.

        Args:
            tokens: int32 [N], N >= 1.
        """
        known = self._known(tokens)
        num_new = -(-tokens.size // PAGE_SLOTS) - len(known)
        if num_new > self.num_free - sum(page in self._kept for page in known):
            return None
        for page in known:
            self._kept.pop(page, None)
            self._num_readers[page] += 1
        pages = known + [self._grab() for _ in range(num_new)]
        for place in range(len(known), tokens.size // PAGE_SLOTS):
            self._give_name(pages[place], _name(pages, tokens, place))
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Releases pages from `take` or `take_known`; full pages of prompts that are computed stay cached."""
        for page in reversed(pages):
            assert self._num_readers[page] > 0
            self._num_readers[page] -= 1
            if self._num_readers[page] > 0:
                continue
            if self._names[page] is not None and self._num_computed[page] == PAGE_SLOTS:
                self._kept[page] = None
            else:
                self._clear(page)

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

    def forget_values(self) -> None:
        """Marks all pages as not computed, after a weight update. Shared pages stay shared."""
        self._num_computed = [0] * len(self._num_computed)

    def _known(self, tokens: TokenIds) -> list[int]:
        pages: list[int] = []
        for place in range(tokens.size // PAGE_SLOTS):
            page = self._by_name.get(_name(pages, tokens, place))
            if page is None:
                break
            pages.append(page)
        return pages

    def _grab(self) -> int:
        if not self._free:
            self._clear(self._kept.popitem(last=False)[0])
        page = self._free.pop()
        self._num_readers[page] = 1
        return page

    def _give_name(self, page: int, name: _Name) -> None:
        self._names[page], self._by_name[name] = name, page

    def _clear(self, page: int) -> None:
        name, self._names[page] = self._names[page], None
        if name is not None:
            del self._by_name[name]
        self._num_computed[page] = 0
        self._free.append(page)


def _name(pages: Sequence[int], tokens: TokenIds, place: int) -> _Name:
    before = pages[place - 1] if place else _ROOT
    return before, np.ascontiguousarray(tokens[place * PAGE_SLOTS : (place + 1) * PAGE_SLOTS], np.int32).tobytes()
