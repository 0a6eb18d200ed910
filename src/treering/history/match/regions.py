"""An allocator of regions, one per slot, for texts of different sizes in one array.

    S slots   U units
"""

import numpy as np
from numba import njit

from treering.arrays import BoolArray, Int32Array, Int64Array

UNIT_BITS = 5
UNIT = 1 << UNIT_BITS
"""Entries that are given out together."""

NOBODY = 0
"""The slot of units that no text has stood in yet."""

NOWHERE = 1 << 40
"""Where the region of a slot without one begins: behind every entry."""


class Regions:
    """Runs of units, one for each slot that has taken one.

    What is given back stays readable, as its slot's, until its units or its slot are taken again. The smallest run of
    free units that is long enough is taken first, of equal ones the first.

    Attributes:
        begins: int64 [S], the entry that a slot's region begins at; `NOWHERE` is none.
        sizes: int64 [S], entries of a slot's region; 0 is none.
        owners: int32 [U], the slot that took a unit last; `NOBODY`, which has no region, where none has.

    Example: the first slot that takes 100 entries has the region from 0 on of 128, the next one begins at 128.
    """

    def __init__(self, *, num_slots: int, max_size: int) -> None:
        """So many slots without regions, beside that of nobody; no region has more than `max_size` entries."""
        self._max_size = max_size
        self.begins = np.full(1 + num_slots, NOWHERE, np.int64)
        self.sizes = np.zeros(1 + num_slots, np.int64)
        self.owners = np.zeros(0, np.int32)
        self._is_taken = np.zeros(0, np.bool_)

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

    def lay_out(self, slots: Int64Array, num_entries: Int64Array) -> None:
        """Gives these slots regions of so many entries, one behind another, and no other slot has any.

        Args:
            slots: int64 [N], all different.
            num_entries: int64 [N], at least; no region has more than the most there may be.
        """
        num_units = -(-np.minimum(num_entries, self._max_size) // UNIT)
        self.begins[:], self.sizes[:] = NOWHERE, 0
        self.begins[slots] = (np.cumsum(num_units) - num_units) * UNIT
        self.sizes[slots] = np.minimum(num_units * UNIT, self._max_size)
        self.owners = np.repeat(slots.astype(np.int32), num_units)
        self._is_taken = np.ones(self.owners.size, np.bool_)

    def take(self, slot: int, num_entries: int) -> bool:
        """Gives a slot a region of at least so many entries, or of the most there may be, unless it has one.

        Whether it was given one: what stands there is not its own.
        """
        if self.sizes[slot] >= min(num_entries, self._max_size) and self._is_taken[self.begins[slot] >> UNIT_BITS]:
            return False
        self.give_back(slot)
        size = min(-(-num_entries // UNIT) * UNIT, self._max_size)
        lacking = _take(self.begins, self.sizes, self.owners, self._is_taken, slot, size)
        if lacking:
            self._extend(max(lacking, self.owners.size // 8))
            _take(self.begins, self.sizes, self.owners, self._is_taken, slot, size)
        return True

    def give_back(self, slot: int) -> None:
        """The units of a slot are free; its text stays until others take them."""
        first = int(self.begins[slot]) >> UNIT_BITS
        self._is_taken[first : first - (-int(self.sizes[slot]) // UNIT)] = False

    def _extend(self, num_units: int) -> None:
        self.owners = np.append(self.owners, np.full(num_units, NOBODY, np.int32))
        self._is_taken = np.append(self._is_taken, np.zeros(num_units, np.bool_))


@njit(cache=True)
def _take(begins: Int64Array, sizes: Int64Array, owners: Int32Array, is_taken: BoolArray, slot: int, size: int) -> int:
    """`Regions.take`; where there is no room, the units that are lacking at the end, else 0."""
    num_units = (size + UNIT - 1) // UNIT
    first = _smallest(is_taken, num_units)
    end = first + num_units
    if end > is_taken.size:
        lacking: int = end - is_taken.size
        return lacking
    for unit in range(first, end):
        other = owners[unit]
        begin, num_held = begins[other] // UNIT, (sizes[other] + UNIT - 1) // UNIT
        # Its text is written over, unless it stands elsewhere now.
        if begin < end and begin + num_held > first:
            begins[other], sizes[other] = NOWHERE, 0
    owners[first:end] = slot
    is_taken[first:end] = True
    begins[slot], sizes[slot] = first * UNIT, size
    return 0


@njit
def _smallest(is_taken: BoolArray, num_units: int) -> int:
    """The first unit of the smallest free run that has so many; where none has, of those at the end."""
    first, size, begin = -1, is_taken.size + 1, 0
    for unit in range(is_taken.size):
        if is_taken[unit]:
            if num_units <= unit - begin < size:
                first, size = begin, unit - begin
            begin = unit + 1
    return begin if first < 0 or num_units <= is_taken.size - begin < size else first
