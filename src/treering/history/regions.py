"""Where the texts of slots stand beside each other: room for each of them, as much as it needs.

Knows slots and sizes. Knows nothing of tokens, and of who has which slot.

    S slots   U units
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

UNIT_BITS = 6
UNIT = 1 << UNIT_BITS
"""Entries that are given out together."""

NOBODY = 0
"""The slot of units that no text has stood in yet."""

NOWHERE = 1 << 40
"""Where the region of a slot without one begins: behind every entry."""


class Regions:
    """Runs of units, one for each slot that has taken one.

    What is given back stays readable, as its slot's, until its units or its slot are taken again. What is as large as
    what is wanted is taken first, and of that what was given back first; then other units, behind those taken last.

    Attributes:
        begins: int64 [S], the entry that a slot's region begins at; `NOWHERE` is none.
        sizes: int64 [S], entries of a slot's region.
        owners: int32 [U], the slot that took a unit last; `NOBODY`, which has no region, where none has.

    Example: the first slot that takes 100 entries has the region from 0 on of 128, the next one begins at 128.
    """

    def __init__(self, *, max_size: int) -> None:
        """Empty, with the slot of nobody; no region has more than `max_size` entries."""
        self._max_size = max_size
        self.begins = np.full(1, NOWHERE, np.int64)
        self.sizes = np.zeros(1, np.int64)
        self.owners = np.zeros(0, np.int32)
        self._is_taken = np.zeros(0, np.bool_)
        self._next = 0
        self._given_back: dict[int, deque[int]] = {}
        # The sizes again, of slots that have a region: what is asked in every step for every row.
        self._held: dict[int, int] = {}

    @property
    def num_entries(self) -> int:
        """That all regions lie in, and the free units between them."""
        return self.owners.size << UNIT_BITS

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in (self.begins, self.sizes, self.owners, self._is_taken))

    def add_slots(self, num_slots: int) -> None:
        """So many more, without regions."""
        self.begins = np.append(self.begins, np.full(num_slots, NOWHERE, np.int64))
        self.sizes = np.append(self.sizes, np.zeros(num_slots, np.int64))

    def forget(self, *, num_regions: int, num_entries: int) -> None:
        """No slot has a region any more; there are units for so many regions of so many entries each."""
        self.begins[:] = NOWHERE
        self.owners, self._is_taken, self._next = np.zeros(0, np.int32), np.zeros(0, np.bool_), 0
        self._given_back, self._held = {}, {}
        self._extend(num_regions * self._num_units(num_entries))

    def holds(self, slot: int, num_entries: int) -> bool:
        """Whether a slot has a region of at least so many entries, or of the most there may be."""
        return self._held.get(slot, 0) >= min(num_entries, self._max_size)

    def take(self, slot: int, num_entries: int) -> None:
        """Gives a slot a region of at least so many entries, or of the most there may be, in place of its own."""
        self.give_back(slot)
        num_units = self._num_units(num_entries)
        first = self._again(num_units)
        if first < 0:
            first = self._find(num_units)
        units = slice(first, first + num_units)
        for other in set(self.owners[units].tolist()):
            # Its text is written over, unless it stands elsewhere now.
            begin = int(self.begins[other]) >> UNIT_BITS
            if begin < units.stop and begin + self._num_units(self._held.get(other, 0)) > first:
                self.begins[other] = NOWHERE
                self._held.pop(other)
        self.owners[units], self._is_taken[units] = slot, True
        self._held[slot] = min(num_units << UNIT_BITS, self._max_size)
        self.begins[slot], self.sizes[slot] = first << UNIT_BITS, self._held[slot]
        self._next = units.stop

    def give_back(self, slot: int) -> None:
        """The units of a slot are free, until they are taken with its text in them."""
        first, num_units = int(self.begins[slot]) >> UNIT_BITS, self._num_units(self._held.get(slot, 0))
        if num_units == 0 or not self._is_taken[first]:
            return
        self._is_taken[first : first + num_units] = False
        self._given_back.setdefault(num_units, deque()).append(first)

    def _num_units(self, num_entries: int) -> int:
        return -(-min(num_entries, self._max_size) // UNIT)

    def _again(self, num_units: int) -> int:
        """So many units that were given back together and are free now, -1 for none: those of a row that has left."""
        given_back = self._given_back.get(num_units, deque())
        while given_back:
            first: int = given_back.popleft()
            if not self._is_taken[first : first + num_units].any():
                return first
        return -1

    def _find(self, num_units: int) -> int:
        """The first of so many free units: behind those taken last, else anywhere, else new ones."""
        behind = self._is_taken[self._next : self._next + num_units]
        if behind.size == num_units and not behind.any():
            return self._next
        bounds = np.flatnonzero(np.diff(self._is_taken, prepend=True, append=True))
        begins, ends = bounds[::2], bounds[1::2]
        fitting = np.flatnonzero(ends - begins >= num_units)
        if fitting.size:
            later = fitting[begins[fitting] >= self._next]
            return int(begins[(later if later.size else fitting)[0]])
        size = self.owners.size
        first = int(begins[-1]) if begins.size and ends[-1] == size else size
        self._extend(max(first + num_units - size, size // 8))
        return first

    def _extend(self, num_units: int) -> None:
        self.owners = np.append(self.owners, np.full(num_units, NOBODY, np.int32))
        self._is_taken = np.append(self._is_taken, np.zeros(num_units, np.bool_))
