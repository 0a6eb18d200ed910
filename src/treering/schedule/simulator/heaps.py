"""Binary heaps in slices of flat arrays, for compiled loops: least key first, lower number on ties."""

from treering.arrays import Float64Array, Int64Array
from treering.compiling.once import compiled_once


@compiled_once()
def push(keys: Float64Array, numbers: Int64Array, base: int, size: int, key: float, number: int) -> None:
    """Adds an entry to the heap of `size` entries that starts at `base`; it then has one more."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if not _is_before(key, number, keys[base + above], numbers[base + above]):
            break
        keys[base + at] = keys[base + above]
        numbers[base + at] = numbers[base + above]
        at = above
    keys[base + at] = key
    numbers[base + at] = number


@compiled_once()
def pop(keys: Float64Array, numbers: Int64Array, base: int, size: int) -> None:
    """Removes the first entry, at `base`, from a heap of `size` >= 1; it then has one less."""
    keys[base], numbers[base] = keys[base + size - 1], numbers[base + size - 1]
    sink(keys, numbers, base, size - 1, 0)


@compiled_once()
def remove(keys: Float64Array, numbers: Int64Array, base: int, size: int, place: int) -> None:
    """Removes the entry at `base + place` from a heap of `size`; it then has one less."""
    key, number = keys[base + size - 1], numbers[base + size - 1]
    if place == size - 1:
        return
    if _is_before(key, number, keys[base + place], numbers[base + place]):
        push(keys, numbers, base, place, key, number)
        return
    keys[base + place], numbers[base + place] = key, number
    sink(keys, numbers, base, size - 1, place)


@compiled_once()
def sink(keys: Float64Array, numbers: Int64Array, base: int, size: int, place: int) -> None:
    """Moves the entry at `base + place` down until its children come after it."""
    if place >= size:
        return
    key, number = keys[base + place], numbers[base + place]
    at = place
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and _comes_first(keys, numbers, base + below + 1, base + below):
            below += 1
        if not _is_before(keys[base + below], numbers[base + below], key, number):
            break
        keys[base + at], numbers[base + at] = keys[base + below], numbers[base + below]
        at = below
    keys[base + at], numbers[base + at] = key, number


@compiled_once()
def _comes_first(keys: Float64Array, numbers: Int64Array, one: int, other: int) -> bool:
    return bool(_is_before(keys[one], numbers[one], keys[other], numbers[other]))


@compiled_once()
def _is_before(key: float, number: int, other_key: float, other_number: int) -> bool:
    return bool(key < other_key or (key == other_key and number < other_number))
