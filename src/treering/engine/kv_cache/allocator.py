"""Who owns which part of the key-value arena: contiguous spans of token slots, first fit.

Knows slot numbers, and of a span's tokens how many are computed. Knows nothing of keys, values, prompts or rollouts.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left

from treering.errors import InputError
from treering.types import TokenIds


class Arena(ABC):
    """What a table of rollouts asks of the memory for keys and values."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Free slots, not necessarily in one piece."""

    @abstractmethod
    def take(self, length: int) -> int | None:
        """First slot of a span of that many slots, or None where there is no room; length >= 1."""

    @abstractmethod
    def take_known(self, tokens: TokenIds) -> int | None:
        """`take` for a prompt of these tokens, some of which may be computed already: see `num_computed`."""

    @abstractmethod
    def give_back(self, start: int) -> None:
        """Frees the span that `take` or `take_known` gave."""

    @abstractmethod
    def num_computed(self, start: int) -> int:
        """Tokens of a span, from its first, whose keys and values are there."""

    @abstractmethod
    def set_computed(self, start: int, num_tokens: int) -> None:
        """Notes that so many are there, or will be before anything reads them; never fewer than before."""

    @abstractmethod
    def forget_values(self) -> None:
        """Nothing is computed any more: the weights have changed."""


class SpanAllocator(Arena):
    """An allocator over slots 0 to num_slots - 1.

    Computed prompts that nobody reads are kept, for whoever asks for the same tokens next, until their room is needed:
    oldest first. Two spans share nothing.

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
        """See `Arena.num_free`; what is only kept counts as free."""
        return sum(length for _, length in self._holes) + sum(self._taken[start] for start in self._kept.values())

    def take(self, length: int) -> int | None:
        """See `Arena.take`; None where no hole is long enough, with all that is only kept given up."""
        assert length >= 1
        start = self._fit(length)
        while start is None and self._kept:
            self._free(self._kept.pop(next(iter(self._kept))))
            start = self._fit(length)
        return start

    def take_known(self, tokens: TokenIds) -> int | None:
        """See `Arena.take_known`; a kept span of these very tokens, else a new one."""
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
        """See `Arena.forget_values`; nothing is kept any more."""
        for start in self._kept.values():
            self._free(start)
        self._kept = {}
        self._computed = dict.fromkeys(self._computed, 0)

    def give_back(self, start: int) -> None:
        """See `Arena.give_back`; a prompt that is wholly computed is kept, once."""
        prompt = self._prompts.pop(start, None)
        if prompt is not None and prompt not in self._kept and self._computed[start] == self._taken[start]:
            self._kept[prompt] = start
        else:
            self._free(start)

    def _fit(self, length: int) -> int | None:
        """Takes the first hole that is long enough."""
        for index, (start, hole) in enumerate(self._holes):
            if hole < length:
                continue
            rest = [(start + length, hole - length)] if hole > length else []
            self._holes[index : index + 1] = rest
            self._taken[start], self._computed[start] = length, 0
            return start
        return None

    def _free(self, start: int) -> None:
        """Makes a span a hole, joined with the holes beside it."""
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
