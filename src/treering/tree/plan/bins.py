"""Bin packing: sizes into as few bins of one capacity as possible.

First-fit decreasing in O(n log n); the optimum for a few sizes.
"""

import numpy as np
from numba import njit

from treering.arrays import Int64Array

MAX_EXACT = 12
"""Most sizes for which the optimum is searched, in 2**n steps."""


@njit(cache=True, nogil=True)
def pack(sizes: Int64Array, capacity: int) -> Int64Array:
    """Bin number of each size, int64 [n]; every size lies in [1, capacity].

    First-fit decreasing, ties in input order: at most 11/9 of the fewest bins, plus one. Up to `MAX_EXACT` sizes get
    the fewest bins.

    Example: sizes 4, 4, 3, 3, 3, 3 in bins of 10 take the bins 0 0 1 1 1 2 by first fit, and 0 1 0 0 1 1 here.
    """
    order = stable_order(-sizes)
    bins = np.empty(sizes.size, np.int64)
    bins[order] = _first_fit(sizes[order], capacity)
    if sizes.size == 0 or sizes.size > MAX_EXACT:
        return bins
    fewest = -(-sizes.sum() // capacity)
    if bins.max() + 1 == fewest:
        return bins
    exact = _fewest_bins(sizes, capacity)
    return exact if exact.max() < bins.max() else bins


@njit(cache=True, nogil=True)
def stable_order(keys: Int64Array) -> Int64Array:
    """Stable `np.argsort`; one shared function, because numba takes seconds to compile a sort."""
    return np.argsort(keys, kind="mergesort")


@njit(cache=True, nogil=True)
def _first_fit(sizes: Int64Array, capacity: int) -> Int64Array:
    """The bin of each size: the first with room for it; all bins are open from the start."""
    width = 1
    while width < sizes.size:
        width *= 2
    # A tournament tree over the bins: each node holds the largest room of any bin below it.
    room = np.full(2 * width, capacity, np.int64)
    bins = np.empty(sizes.size, np.int64)
    for i in range(sizes.size):
        node = 1
        while node < width:
            node = 2 * node if room[2 * node] >= sizes[i] else 2 * node + 1
        bins[i] = node - width
        room[node] -= sizes[i]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


@njit(cache=True, nogil=True)
def _fewest_bins(sizes: Int64Array, capacity: int) -> Int64Array:
    """Fewest bins by dynamic programming over subsets: fewest bins first, then the least fill of the last one."""
    n = sizes.size
    num_bins = np.full(1 << n, n + 1, np.int64)
    fill = np.zeros(1 << n, np.int64)
    last = np.zeros(1 << n, np.int64)
    num_bins[0], fill[0] = 0, capacity
    for subset in range(1 << n):
        for i in range(n):
            if subset >> i & 1:
                continue
            larger = subset | 1 << i
            opens = fill[subset] + sizes[i] > capacity
            count = num_bins[subset] + (1 if opens else 0)
            filled = sizes[i] if opens else fill[subset] + sizes[i]
            if count < num_bins[larger] or (count == num_bins[larger] and filled < fill[larger]):
                num_bins[larger], fill[larger], last[larger] = count, filled, i
    bins = np.empty(n, np.int64)
    subset = (1 << n) - 1
    while subset:
        bins[last[subset]] = num_bins[subset] - 1
        subset &= ~(1 << last[subset])
    return bins
