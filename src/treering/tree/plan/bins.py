"""Bin packing: sizes into as few bins of one capacity as possible.

First-fit decreasing in O(n log n); the optimum for a few sizes. Plain Python: there are as many sizes as parts of trees
or as trees, some thousands at most.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

MAX_EXACT = 12
"""Most sizes for which the optimum is searched, in 2**n steps."""


def pack(sizes: Sequence[int], capacity: int) -> list[int]:
    """Bin number of each size; every size lies in [1, capacity].

    First-fit decreasing, ties in input order: at most 11/9 of the fewest bins, plus one. Up to `MAX_EXACT` sizes get
    the fewest bins.

    Example: sizes 4, 4, 3, 3, 3, 3 in bins of 10 take the bins 0 0 1 1 1 2 by first fit, and 0 1 0 0 1 1 here.
    """
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    bins = [0] * len(sizes)
    for i, number in zip(order, _first_fit([sizes[i] for i in order], capacity), strict=True):
        bins[i] = number
    num_bins = max(bins, default=-1) + 1
    if len(sizes) > MAX_EXACT or num_bins == -(-sum(sizes) // capacity):
        return bins
    exact = _fewest_bins(tuple(sizes), capacity)
    return list(exact) if max(exact) + 1 < num_bins else bins


def _first_fit(sizes: Sequence[int], capacity: int) -> list[int]:
    """The bin of each size: the first with room for it; all bins are open from the start."""
    width = 1
    while width < len(sizes):
        width *= 2
    # A tournament tree over the bins: each node holds the largest room of any bin below it.
    room = [capacity] * (2 * width)
    bins = []
    for size in sizes:
        node = 1
        while node < width:
            node = 2 * node if room[2 * node] >= size else 2 * node + 1
        bins.append(node - width)
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


@lru_cache(maxsize=1024)
def _fewest_bins(sizes: tuple[int, ...], capacity: int) -> tuple[int, ...]:
    """Fewest bins by dynamic programming over subsets: fewest bins first, then the least fill of the last one.

    Kept, because trees of a batch are often cut alike.
    """
    n = len(sizes)
    # Bins and fill of the last one as one number: bins * (capacity + 1) + fill.
    filled = np.full(1 << n, (n + 1) * (capacity + 1), np.int64)
    last = np.zeros(1 << n, np.int64)
    filled[0] = capacity
    subsets = np.arange(1 << n)
    for count in range(n):
        of_count = subsets[_num_ones(n) == count]
        for i in reversed(range(n)):
            smaller = of_count[of_count >> i & 1 == 0]
            bins, fill = np.divmod(filled[smaller], capacity + 1)
            opens = fill + sizes[i] > capacity
            found = (bins + opens) * (capacity + 1) + np.where(opens, sizes[i], fill + sizes[i])
            larger = smaller | 1 << i
            better = found < filled[larger]
            filled[larger[better]], last[larger[better]] = found[better], i
    bins_of = [0] * n
    subset = (1 << n) - 1
    while subset:
        bins_of[last[subset]] = int(filled[subset]) // (capacity + 1) - 1
        subset &= ~(1 << int(last[subset]))
    return tuple(bins_of)


@lru_cache
def _num_ones(num_bits: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """How many bits are set in each number of so many bits."""
    return np.bitwise_count(np.arange(1 << num_bits))
