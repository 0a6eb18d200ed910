"""Allocates contiguous spans of the key-value arena, first fit, and tracks how many tokens of each are computed."""

from bisect import bisect_left

import numpy as np

from treering.errors import InputError
from treering.types import TokenIds


class SpanAllocator:
    """Spans of slots 0 to num_slots - 1.

    Computed prompts without readers stay cached for the next request with the same tokens, and are evicted oldest
    first when space is needed. Spans do not overlap.

    Example: of 10 slots, three times `allocate(4)` gives 0, 4 and None; after `free(0)` it gives 0.
    """

    def __init__(self, num_slots: int) -> None:
        """All slots are free."""
        if num_slots < 1:
            raise InputError(f"an arena has at least one slot, got {num_slots}; raise max_tokens")
        self.num_slots = num_slots
        self._holes: list[tuple[int, int]] = [(0, num_slots)]  # (start, length), ascending, never adjacent
        self._taken: dict[int, int] = {}
        self._computed: dict[int, int] = {}
        self._prompts: dict[int, bytes] = {}
        self._cached: dict[bytes, int] = {}  # by the tokens, oldest first

    @property
    def num_free(self) -> int:
        """Free slots, not necessarily in one piece; those of cached prompts count."""
        return sum(length for _, length in self._holes) + sum(self._taken[start] for start in self._cached.values())

    def allocate(self, length: int) -> int | None:
        """First slot of a new span of `length` >= 1 slots, or None if there is no space.

        Evicts cached prompts until a hole is long enough.
        """
        assert length >= 1
        start = self._fit(length)
        while start is None and self._cached:
            self._free(self._cached.pop(next(iter(self._cached))))
            start = self._fit(length)
        return start

    def allocate_prompt(self, tokens: TokenIds) -> int | None:
        """`allocate` for a prompt: the cached span of exactly these tokens, else a new one; see `num_computed`."""
        prompt = tokens.tobytes()
        start = self._cached.pop(prompt, None)
        if start is None:
            start = self.allocate(tokens.size)
        if start is not None:
            self._prompts[start] = prompt
        return start

    def cached_prompts(self) -> list[tuple[TokenIds, int]]:
        """Tokens and first slot of computed prompts without readers, which `allocate` may evict; oldest first."""
        return [(np.frombuffer(prompt, np.int32), start) for prompt, start in self._cached.items()]

    def note_use(self, start: int) -> None:
        """Makes a cached prompt the last one to evict; ignores other spans."""
        prompt = next((prompt for prompt, cached in self._cached.items() if cached == start), None)
        if prompt is not None:
            self._cached[prompt] = self._cached.pop(prompt)

    def num_computed(self, start: int) -> int:
        """Leading tokens of a span whose keys and values are computed."""
        return self._computed[start]

    def set_computed(self, start: int, num_tokens: int) -> None:
        """Marks the first `num_tokens` as computed, or computed before anything reads them; never lowers the count."""
        self._computed[start] = max(self._computed[start], num_tokens)

    def invalidate(self) -> None:
        """Marks everything as not computed, after a weight update, and evicts all cached prompts."""
        for start in self._cached.values():
            self._free(start)
        self._cached = {}
        self._computed = dict.fromkeys(self._computed, 0)

    def shrink(self, start: int, length: int) -> None:
        """Keeps the first `length` >= 1 slots of a span from `allocate` and frees the others."""
        assert 1 <= length <= self._taken[start]
        num_freed = self._taken[start] - length
        self._taken[start] = length
        if num_freed > 0:
            self._add_hole(start + length, num_freed)

    def free(self, start: int) -> None:
        """Frees a span; caches a fully computed prompt, unless the same prompt is already cached."""
        prompt = self._prompts.pop(start, None)
        if prompt is not None and prompt not in self._cached and self._computed[start] == self._taken[start]:
            self._cached[prompt] = start
        else:
            self._free(start)

    def _fit(self, length: int) -> int | None:
        """Allocates from the first hole that is long enough."""
        for index, (start, hole) in enumerate(self._holes):
            if hole < length:
                continue
            rest = [(start + length, hole - length)] if hole > length else []
            self._holes[index : index + 1] = rest
            self._taken[start], self._computed[start] = length, 0
            return start
        return None

    def _free(self, start: int) -> None:
        del self._computed[start]
        self._add_hole(start, self._taken.pop(start))

    def _add_hole(self, start: int, length: int) -> None:
        """Adds a hole, merged with adjacent ones."""
        end = start + length
        first = last = bisect_left(self._holes, (start, 0))
        if first > 0 and sum(self._holes[first - 1]) == start:
            first -= 1
            start = self._holes[first][0]
        if last < len(self._holes) and self._holes[last][0] == end:
            end = sum(self._holes[last])
            last += 1
        self._holes[first:last] = [(start, end - start)]
