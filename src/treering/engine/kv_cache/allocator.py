"""Allocates contiguous spans of the key-value arena, first fit, and tracks how many tokens of each are computed."""

from abc import ABC, abstractmethod
from bisect import bisect_left

from treering.errors import InputError
from treering.types import TokenIds


class Arena(ABC):
    """The interface of key-value memory: spans of token slots."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Free slots, not necessarily in one piece."""

    @abstractmethod
    def take(self, length: int) -> int | None:
        """First slot of a new span of `length` >= 1 slots, or None if there is no space."""

    @abstractmethod
    def take_known(self, tokens: TokenIds) -> int | None:
        """`take` for a prompt with these tokens, some of which may already be computed: see `num_computed`."""

    @abstractmethod
    def give_back(self, start: int) -> None:
        """Frees a span from `take` or `take_known`."""

    @abstractmethod
    def num_computed(self, start: int) -> int:
        """Leading tokens of a span whose keys and values are computed."""

    @abstractmethod
    def set_computed(self, start: int, num_tokens: int) -> None:
        """Marks the first `num_tokens` as computed, or computed before anything reads them; never lowers the count."""

    @abstractmethod
    def forget_values(self) -> None:
        """Marks everything as not computed, after a weight update."""


class SpanAllocator(Arena):
    """An allocator over slots 0 to num_slots - 1.

    Computed prompts without readers stay cached for the next request with the same tokens, and are evicted oldest
    first when space is needed. Spans do not overlap.

    Example: of 10 slots, `take(4)` gives 0, `take(4)` gives 4, `take(4)` gives None; after `give_back(0)` it gives 0.
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
        self._kept: dict[bytes, int] = {}  # by the tokens, oldest first

    @property
    def num_free(self) -> int:
        """See `Arena.num_free`; cached prompts count as free."""
        return sum(length for _, length in self._holes) + sum(self._taken[start] for start in self._kept.values())

    def take(self, length: int) -> int | None:
        """See `Arena.take`; evicts cached prompts until a hole is long enough."""
        assert length >= 1
        start = self._fit(length)
        while start is None and self._kept:
            self._free(self._kept.pop(next(iter(self._kept))))
            start = self._fit(length)
        return start

    def take_known(self, tokens: TokenIds) -> int | None:
        """See `Arena.take_known`; the cached span of exactly these tokens, else a new one."""
        prompt = tokens.tobytes()
        start = self._kept.pop(prompt, None)
        if start is None:
            start = self.take(tokens.size)
        if start is not None:
            self._prompts[start] = prompt
        return start

    def num_computed(self, start: int) -> int:
        """See `Arena.num_computed`."""
        return self._computed[start]

    def set_computed(self, start: int, num_tokens: int) -> None:
        """See `Arena.set_computed`."""
        self._computed[start] = max(self._computed[start], num_tokens)

    def forget_values(self) -> None:
        """See `Arena.forget_values`; evicts all cached prompts."""
        for start in self._kept.values():
            self._free(start)
        self._kept = {}
        self._computed = dict.fromkeys(self._computed, 0)

    def give_back(self, start: int) -> None:
        """See `Arena.give_back`; caches a fully computed prompt, unless the same prompt is already cached."""
        prompt = self._prompts.pop(start, None)
        if prompt is not None and prompt not in self._kept and self._computed[start] == self._taken[start]:
            self._kept[prompt] = start
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
        """Turns a span into a hole, merged with adjacent holes."""
        del self._computed[start]
        end = start + self._taken.pop(start)
        first = last = bisect_left(self._holes, (start, 0))
        if first > 0 and sum(self._holes[first - 1]) == start:
            first -= 1
            start = self._holes[first][0]
        if last < len(self._holes) and self._holes[last][0] == end:
            end = sum(self._holes[last])
            last += 1
        self._holes[first:last] = [(start, end - start)]
