"""Where the end of a context occurs in a text, and the tokens that follow: by scanning, slow and simple.

Texts are int32 tokens with a marker between rollouts. Only the baselines use it.
"""

import numpy as np
from numba import njit

from treering.arrays import Float64Array, Int32Array, Int64Array

MARKER = -1
"""Stands before, between and after rollouts; no draft crosses it."""


@njit(cache=True)
def occurrences(text: Int32Array, context: Int32Array, shortest: int, longest: int) -> tuple[int, Int64Array]:
    """Length of the longest end of the context that occurs before another token, and the positions of those tokens.

    Ends of `shortest` to `longest` tokens count; the length is 0 where there is none.

    Example: in 5 6 7 5 6 8 the context 4 5 6 has an end of length 2, at the positions 2 and 5.
    """
    positions = np.empty(text.size, np.int64)
    best, count = 0, 0
    if context.size == 0:
        return 0, positions[:0]
    last = context[context.size - 1]
    for at in range(text.size - 1):
        if text[at] != last or text[at + 1] == MARKER:
            continue
        length, limit = 1, min(longest, at + 1, context.size)
        while length < limit and text[at - length] == context[context.size - 1 - length]:
            length += 1
        if length < max(best, shortest):
            continue
        if length > best:
            best, count = length, 0
        positions[count] = at + 1
        count += 1
    return best, positions[:count]


@njit(cache=True)
def favourite(text: Int32Array, positions: Int64Array, weights: Float64Array) -> tuple[int, int]:
    """The token at the positions with the largest sum of weights, of equal sums the more frequent one; and its count.

    Args:
        text: int32 [n].
        positions: int64 [p], in the text.
        weights: float64 [n], of each position.

    Example: tokens 7, 8, 8 with weights 1, 0.25, 0.25 give (7, 1).
    """
    order = np.argsort(text[positions], kind="mergesort")
    best, best_count, best_sum = MARKER, 0, 0.0
    begin = 0
    while begin < order.size:
        token, end, total = text[positions[order[begin]]], begin, 0.0
        while end < order.size and text[positions[order[end]]] == token:
            total += weights[positions[order[end]]]
            end += 1
        is_better = total > best_sum or (total == best_sum and end - begin > best_count)
        if token != MARKER and (best_count == 0 or is_better):
            best, best_count, best_sum = token, end - begin, total
        begin = end
    return best, best_count


@njit(cache=True)
def favourite_path(
    text: Int32Array, positions: Int64Array, weights: Float64Array, most: int, min_share: float
) -> Int32Array:
    """Goes on from the positions by their favourite token, keeping those that have it, for `most` tokens.

    It ends where no position is left, and before the product of the shares of positions followed at each token falls
    below `min_share`.

    Example: from positions of 7 8, 7 9 and 7 8 it goes 7, 8; with a `min_share` of 0.7 it ends after 7.
    """
    path = np.empty(most, np.int32)
    share = 1.0
    for depth in range(most):
        token, count = favourite(text, positions, weights)
        if count == 0:
            return path[:depth]
        share *= count / positions.size
        if share < min_share:
            return path[:depth]
        path[depth] = token
        positions = positions[text[positions] == token] + 1
    return path
