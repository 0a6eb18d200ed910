"""Places where a row's context occurs, with all that speaks for the token behind each.

Knows what is said of a place. Knows nothing of how places are found and of what becomes of their tokens. A place is a
match of some tokens, or it stands where an old trajectory goes on behind one edit: a token replaced, added or left out.

    M places
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treering.history.arena import NUM_AGES, NUM_REWARDS
from treering.history.features import HISTORY, NUM_LENGTH_CLASSES, edit_bucket, length_bucket
from treering.history.lean import lean

Int32Array = NDArray[np.int32]

MAX_PLACES = 64
IN_HISTORY, IN_LIVE, IN_OTHERS = range(3)
"""The texts that places stand in: history of the row's prompt, what is running, history of other prompts."""


class Places(NamedTuple):
    """Room for the places of one row, or of several, one after another."""

    at: Int32Array  # [M], of the token behind the match
    source: Int32Array  # [M]
    text: Int32Array  # [M], that it stands in
    length: Int32Array  # [M]
    edit: Int32Array  # [M], bucket
    shift: Int32Array  # [M], bucket
    note: Int32Array  # [M], of history the arena's note, else rank by newness
    weight: NDArray[np.float64]  # [M], what it counts apart from its length
    reward: NDArray[np.float64]  # [M]


@njit
def make_places(num_rows: int) -> Places:
    """Room for the places of so many rows."""
    ints = np.empty((7, num_rows * MAX_PLACES), np.int32)
    floats = np.empty((2, num_rows * MAX_PLACES), np.float64)
    return Places(ints[0], ints[1], ints[2], ints[3], ints[4], ints[5], ints[6], floats[0], floats[1])


@lean
def places_of(places: Places, k: int) -> Places:
    """The room of the k-th row."""
    part = slice(k * MAX_PLACES, (k + 1) * MAX_PLACES)
    return Places(
        places.at[part], places.source[part], places.text[part], places.length[part], places.edit[part],
        places.shift[part], places.note[part], places.weight[part], places.reward[part],
    )  # fmt: skip


@lean
def is_known(places: Places, num: int, text: int, at: int) -> bool:
    """Whether a place of a text is noted already."""
    found = False
    for i in range(num):
        found |= places.at[i] == at and places.text[i] == text
    return bool(found)


@lean
def put(
    places: Places, num: int, source: int, text: int, at: int, length: int, edit: int, shift: int, note: int,
    reward: float,
) -> int:  # fmt: skip
    """Notes a place where there is room; returns how many there are then."""
    if num == MAX_PLACES:
        return num
    i = np.uintp(num)
    places.at[i], places.text[i], places.source[i], places.length[i] = at, text, source, length
    places.edit[i], places.shift[i], places.note[i] = edit_bucket(edit), shift, note
    places.reward[i] = reward
    return num + 1


@lean
def longest_of(places: Places, num: int) -> int:
    """The longest match."""
    longest = 0
    for i in range(num):
        longest = max(longest, places.length[i])
    return longest


@lean
def newness_of(places: Places, i: int) -> int:
    """How many places or rollouts are newer, 0 to 3."""
    return int(places.note[i] // (NUM_AGES * NUM_REWARDS) if places.source[i] == HISTORY else places.note[i])


@lean
def age_of(places: Places, i: int) -> int:
    """Age in versions, 0 to 3; running rows are of the newest."""
    return places.note[i] % NUM_AGES if places.source[i] == HISTORY else 0


@lean
def vote_bucket(length: int) -> int:
    """Of the length, as far as it matters beside an edit."""
    return int(min(length_bucket(length), NUM_LENGTH_CLASSES - 1))
