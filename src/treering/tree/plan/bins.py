"""Bin packing: sizes into as few bins of one capacity as possible.

First-fit decreasing in O(n log n). Plain Python: there are as many sizes as parts of trees or as trees, some thousands
at most.
"""

from collections.abc import Sequence


def pack(sizes: Sequence[int], capacity: int) -> list[int]:
    """Bin number of each size; every size lies in [1, capacity].

    First-fit decreasing, ties in input order: at most 11/9 of the fewest bins, plus one.

    Example: sizes 4, 4, 3, 3, 3, 3 in bins of 10 take the bins 0 0 1 1 1 2.
    """
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    bins = [0] * len(sizes)
    for i, number in zip(order, _first_fit([sizes[i] for i in order], capacity), strict=True):
        bins[i] = number
    return bins


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
