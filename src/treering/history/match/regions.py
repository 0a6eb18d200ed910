"""An allocator of regions, one per slot, for texts of different sizes in one array.

S slots   U units
"""

import numpy as np

from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.lean import kernel, lean

UNIT_BITS = 5
UNIT = 1 << UNIT_BITS
"""Entries per unit of allocation."""

NO_SLOT = 0
"""The owner of units that were never allocated."""

NOWHERE = 1 << 40
"""The begin of a slot without a region: after every entry."""


class Regions:
    """Allocates runs of units to slots, best fit: the smallest free run that is long enough, the first of equal ones.

    A region that is given back stays readable by its slot until its units or its slot are allocated again.

    Attributes:
        begins: int64 [S], first entry of a slot's region; `NOWHERE` is none.
        sizes: int64 [S], entries of a slot's region; 0 is none.
        owners: int32 [U], the slot that took a unit last; `NO_SLOT`, which has no region, if none did.

    Example: the first slot that takes 100 entries gets entries 0 to 127, the next region begins at 128.
    """

    def __init__(self, *, num_slots: int, max_size: int) -> None:
        """So many slots without regions, plus `NO_SLOT`; no region has more than `max_size` entries."""
        self._max_size = max_size
        self.begins = np.full(1 + num_slots, NOWHERE, np.int64)
        self.sizes = np.zeros(1 + num_slots, np.int64)
        self.owners = np.zeros(0, np.int32)
        self._is_taken = np.zeros(0, np.bool_)

    @property
    def num_entries(self) -> int:
        """Entries of all regions, and of the free units between them."""
        return self.owners.size << UNIT_BITS

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in (self.begins, self.sizes, self.owners, self._is_taken))

    def add_slots(self, num_slots: int) -> None:
        """Adds so many slots without regions."""
        self.begins = np.append(self.begins, np.full(num_slots, NOWHERE, np.int64))
        self.sizes = np.append(self.sizes, np.zeros(num_slots, np.int64))

    def lay_out(self, slots: Int64Array, num_entries: Int64Array) -> None:
        """Allocates all regions anew: these slots get adjacent ones, other slots have none.

        Args:
            slots: int64 [N], all different.
            num_entries: int64 [N], minimum size of each region; none exceeds `max_size`.
        """
        num_units = -(-np.minimum(num_entries, self._max_size) // UNIT)
        self.begins[:], self.sizes[:] = NOWHERE, 0
        self.begins[slots] = (np.cumsum(num_units) - num_units) * UNIT
        self.sizes[slots] = np.minimum(num_units * UNIT, self._max_size)
        self.owners = np.repeat(slots.astype(np.int32), num_units)
        self._is_taken = np.ones(self.owners.size, np.bool_)

    def take(self, slot: int, num_entries: int) -> bool:
        """Allocates a slot a region of at least so many entries, at most `max_size`, unless it has one.

        Returns whether it allocated one; its content is then not the slot's own.
        """
        if self.sizes[slot] >= min(num_entries, self._max_size) and self._is_taken[self.begins[slot] >> UNIT_BITS]:
            return False
        self.give_back(slot)
        size = min(-(-num_entries // UNIT) * UNIT, self._max_size)
        num_missing = _take(self.begins, self.sizes, self.owners, self._is_taken, slot, size)
        if num_missing:
            self._extend(max(num_missing, self.owners.size // 8))
            _take(self.begins, self.sizes, self.owners, self._is_taken, slot, size)
        return True

    def give_back(self, slot: int) -> None:
        """Frees the units of a slot; its text stays until others take them."""
        first = int(self.begins[slot]) >> UNIT_BITS
        self._is_taken[first : first - (-int(self.sizes[slot]) // UNIT)] = False

    def _extend(self, num_units: int) -> None:
        self.owners = np.append(self.owners, np.full(num_units, NO_SLOT, np.int32))
        self._is_taken = np.append(self._is_taken, np.zeros(num_units, np.bool_))


@kernel
def _take(begins: Int64Array, sizes: Int64Array, owners: Int32Array, is_taken: BoolArray, slot: int, size: int) -> int:
    """`Regions.take`; returns 0, or the units missing at the end if nothing fits."""
    num_units = (size + UNIT - 1) // UNIT
    first = _smallest(is_taken, num_units)
    end = first + num_units
    if end > is_taken.size:
        num_missing: int = end - is_taken.size
        return num_missing
    for unit in range(first, end):
        other = owners[unit]
        begin, num_held = begins[other] // UNIT, (sizes[other] + UNIT - 1) // UNIT
        # The owner's text is overwritten, unless it has moved elsewhere.
        if begin < end and begin + num_held > first:
            begins[other], sizes[other] = NOWHERE, 0
    for unit in range(first, end):
        owners[unit], is_taken[unit] = slot, True
    begins[slot], sizes[slot] = first * UNIT, size
    return 0


@lean
def _smallest(is_taken: BoolArray, num_units: int) -> int:
    """The first unit of the smallest free run of so many units; if there is none, of the free run at the end."""
    first, size, begin = -1, is_taken.size + 1, 0
    for unit in range(is_taken.size):
        if is_taken[unit]:
            if num_units <= unit - begin < size:
                first, size = begin, unit - begin
            begin = unit + 1
    return begin if first < 0 or num_units <= is_taken.size - begin < size else first
