"""Regions never overlap, lie where their units say, and keep a text readable until it is overwritten."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treering.history.match.regions import NO_SLOT, NOWHERE, UNIT, Regions

MAX_SIZE = 6 * UNIT + 2
NUM_SLOTS = 8

Operation = tuple[str, int, int]
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["take", "take", "give_back"]), st.integers(1, NUM_SLOTS), st.integers(2, 10 * UNIT)),
    max_size=60,
)


@dataclass
class Model:
    """Which units each slot that has a region was given for how much, and which of them are still its own."""

    held: dict[int, range] = field(default_factory=dict)
    readable: dict[int, range] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    def take(self, slot: int, units: range) -> None:
        self.held.pop(slot, None)
        assert all(set(units).isdisjoint(other) for other in self.held.values())
        self.readable.pop(slot, None)
        self.readable = {other: own for other, own in self.readable.items() if set(units).isdisjoint(own)}
        self.held[slot] = self.readable[slot] = units


def regions_with(num_slots: int = NUM_SLOTS, max_size: int = MAX_SIZE) -> Regions:
    regions = Regions(num_slots=num_slots // 2, max_size=max_size)
    regions.add_slots(num_slots - num_slots // 2)
    return regions


def units_of(regions: Regions, slot: int) -> range:
    begin = int(regions.begins[slot])
    assert begin % UNIT == 0
    return range(begin // UNIT, -(-(begin + int(regions.sizes[slot])) // UNIT))


@given(OPERATIONS)
def test_regions_are_apart_and_readable_until_their_units_or_slots_are_taken(operations: list[Operation]) -> None:
    regions, model = regions_with(), Model()
    for name, slot, num_entries in operations:
        if name == "take":
            had = model.held.get(slot)
            was_given = regions.take(slot, num_entries)
            assert was_given == (had is None or model.sizes[slot] < min(num_entries, MAX_SIZE))
            if was_given:
                assert min(num_entries, MAX_SIZE) <= regions.sizes[slot] <= min(num_entries + UNIT - 1, MAX_SIZE)
                model.take(slot, units_of(regions, slot))
                model.sizes[slot] = int(regions.sizes[slot])
        else:
            regions.give_back(slot)
            model.held.pop(slot, None)
        for other in range(1, NUM_SLOTS + 1):
            assert (regions.begins[other] == NOWHERE) == (other not in model.readable)
        for other, units in model.readable.items():
            assert units_of(regions, other) == units
            assert (regions.owners[units.start : units.stop] == other).all()
            assert units.stop * UNIT <= regions.num_entries
        assert regions.begins[NO_SLOT] == NOWHERE


@given(OPERATIONS)
def test_what_is_free_is_taken_before_there_is_more(operations: list[Operation]) -> None:
    """More units come only where no run of free ones is long enough, and hardly more than are needed."""
    regions, held = regions_with(), dict[int, range]()
    for name, slot, num_entries in operations:
        held.pop(slot, None)
        if name == "give_back":
            regions.give_back(slot)
            continue
        before = regions.owners.size
        is_free = np.ones(before + 1, np.bool_)
        for units in held.values():
            is_free[units.start : units.stop] = False
        is_free[before] = False
        ends = np.flatnonzero(~is_free)
        longest = int(np.diff(ends, prepend=-1).max()) - 1
        regions.take(slot, num_entries)
        held[slot] = units_of(regions, slot)
        num_last = before - 1 - int(ends[-2]) if ends.size > 1 else before
        assert (regions.owners.size > before) == (longest < len(held[slot]))
        assert regions.owners.size <= before + max(len(held[slot]) - num_last, before // 8)


def test_the_smallest_run_that_is_long_enough_is_taken_and_of_equal_ones_the_first() -> None:
    regions = regions_with()
    for slot, num_units in enumerate((1, 3, 1, 2, 1, 2, 1), 1):
        regions.take(slot, num_units * UNIT)
    for slot in (2, 4, 6):
        regions.give_back(slot)
    # Runs of 3, 2 and 2 units, from 1, 5 and 8 on.
    assert regions.take(8, UNIT + 1)
    assert units_of(regions, 8) == range(5, 7)
    # One unit more than the smallest run that is left.
    assert regions.take(4, 3 * UNIT)
    assert units_of(regions, 4) == range(1, 4)
    assert units_of(regions, 6) == range(8, 10)
    assert regions.begins[2] == NOWHERE
    # The run at the end is one of them: of 1 unit, where the other has 3.
    regions.take(6, 2 * UNIT)
    regions.give_back(4)
    regions.give_back(7)
    regions.take(2, UNIT)
    assert units_of(regions, 2) == range(10, 11)


def test_what_was_given_back_is_written_over_when_its_slot_takes_the_same_units_again() -> None:
    regions = regions_with()
    assert regions.take(1, UNIT)
    assert not regions.take(1, UNIT - 1)
    regions.give_back(1)
    assert regions.begins[1] == 0
    assert regions.take(1, UNIT)
    assert regions.num_entries == UNIT


def test_regions_that_are_laid_out_stand_side_by_side_and_no_other_slot_has_any() -> None:
    regions = regions_with()
    for slot in range(1, 5):
        regions.take(slot, 3 * UNIT)
    regions.lay_out(np.array([4, 1, 7]), np.array([UNIT + 1, UNIT, MAX_SIZE + 9]))
    assert [units_of(regions, slot) for slot in (4, 1, 7)] == [range(2), range(2, 3), range(3, 10)]
    assert regions.sizes[[4, 1, 7]].tolist() == [2 * UNIT, UNIT, MAX_SIZE]
    assert regions.num_entries == 10 * UNIT
    assert regions.owners.tolist() == [4, 4, 1] + [7] * 7
    others = [slot for slot in range(NUM_SLOTS + 1) if slot not in (4, 1, 7)]
    assert (regions.begins[others] == NOWHERE).all()
    assert (regions.sizes[others] == 0).all()
    # All of them are held.
    assert not regions.take(4, UNIT + 1)
    assert regions.take(2, 1)
    assert units_of(regions, 2) == range(10, 11)
    assert regions.num_bytes == (NUM_SLOTS + 1) * 16 + 11 * 5
