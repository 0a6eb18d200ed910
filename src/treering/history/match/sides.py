"""Walks an index outwards from where a context belongs, the best matches first.

N entries of an order
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import Int32Array
from treering.history.match.suffix_search import MAX_LENGTH, agree
from treering.lean import lean


class Sides(NamedTuple):
    """The next positions to the left and right, and the length of each match; -1 is not measured yet."""

    left: int
    right: int
    left_length: int
    right_length: int


@lean
def sides_of(right: int) -> Sides:
    """The sides of a context that so many positions sort before."""
    return Sides(right - 1, right, -1, -1)


@lean
def next_match(
    sides: Sides, text: Int32Array, order: Int32Array, start: int, context: Int32Array, begin: int
) -> tuple[int, int, Sides]:
    """The next longest match: its position in the text, its length, and the sides after it.

    A length of 0 means that no match is left, and the position is meaningless. Of equally long matches the right one
    comes first.

    Args:
        sides: of the context.
        text: int32.
        order: int32 [N], positions from `start` of the text on.
        start: where the index's text begins.
        context: int32 [n].
        begin: where the rollout begins in it.
    """
    left, right, left_length, right_length = sides
    last = context.size - 1
    if left_length < 0:
        left_length = agree(text, start + order[np.uintp(left)], context, last, begin, MAX_LENGTH) if left >= 0 else 0
    if right_length < 0:
        right_length = (
            agree(text, start + order[np.uintp(right)], context, last, begin, MAX_LENGTH) if right < order.size else 0
        )
    if left_length > right_length:
        return start + order[left], left_length, Sides(left - 1, right, -1, right_length)
    if right_length == 0:
        return -1, 0, Sides(left, right, left_length, right_length)
    return start + order[right], right_length, Sides(left, right + 1, left_length, -1)
