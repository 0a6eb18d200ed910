"""Who owns which part of the key-value arena: contiguous spans of token slots, first fit.

Knows slot numbers only. Knows nothing of keys, values, prompts or rollouts.
"""

from treering.errors import InputError


class Spans:
    """An allocator over slots 0 to num_slots - 1.

    Example: of 10 slots, `take(4)` gives 0, `take(4)` gives 4, `take(4)` gives None; after `give_back(0)` it gives 0.
    """

    def __init__(self, num_slots: int) -> None:
        """All slots are free."""
        if num_slots < 1:
            raise InputError(f"an arena has at least one slot, got {num_slots}; raise max_tokens")
        self.num_slots = num_slots
        self._holes: list[tuple[int, int]] = [(0, num_slots)]  # (start, length), ascending, never adjacent
        self._taken: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Free slots, not necessarily in one piece."""
        return sum(length for _, length in self._holes)

    def take(self, length: int) -> int | None:
        """First slot of a span of that many slots, or None where no hole is long enough; length >= 1."""
        assert length >= 1
        for index, (start, hole) in enumerate(self._holes):
            if hole < length:
                continue
            rest = [(start + length, hole - length)] if hole > length else []
            self._holes[index : index + 1] = rest
            self._taken[start] = length
            return start
        return None

    def give_back(self, start: int) -> None:
        """Frees the span that `take` gave; it joins the holes beside it."""
        self._holes.append((start, self._taken.pop(start)))
        merged: list[tuple[int, int]] = []
        for hole in sorted(self._holes):
            if merged and sum(merged[-1]) == hole[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + hole[1])
            else:
                merged.append(hole)
        self._holes = merged
