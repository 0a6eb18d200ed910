import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from treering.schedule.simulator.heaps import pop, push, remove

# Few keys, so that many tie.
ENTRIES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=12)


def heap_of(entries, base):
    """A heap of float keys within arrays that hold something else on both sides."""
    keys, numbers = np.full(base + 20, -7.0), np.full(base + 20, -7)
    for size, (key, number) in enumerate(entries):
        push(keys, numbers, base, size, float(key), number)
    return keys, numbers


def drained(keys, numbers, base, size):
    """All entries in the order in which they come out."""
    found = []
    for left in range(size, 0, -1):
        found.append((keys[base], numbers[base]))
        pop(keys, numbers, base, left)
    return found


@settings(max_examples=100, deadline=None)
@given(ENTRIES, st.data())
def test_an_entry_taken_out_of_the_middle_is_missing_and_no_other(entries, data):
    keys, numbers = heap_of(entries, 2)
    place = data.draw(st.integers(0, len(entries) - 1))
    gone = (keys[2 + place], numbers[2 + place])
    remove(keys, numbers, 2, len(entries), place)
    expected = sorted(entries)
    expected.remove(gone)
    assert drained(keys, numbers, 2, len(entries) - 1) == expected
