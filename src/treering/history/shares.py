"""A candidate's shares of a node's votes: among all places, in each source, among the longest matches.

Knows votes that were counted. Knows nothing of places, and of what shares are worth.
"""

import numpy as np
from numpy.typing import NDArray

from treering.history.features import NUM_SOURCES, stretch
from treering.history.lean import lean
from treering.history.rooms import MAX_CANDIDATES, Candidates

Float32Array = NDArray[np.float32]

_MEAN_SHARE = 0.02
_NUM_STRETCHES = 1024
# Made once: a logarithm for each share of each candidate would take longer than all the rest of it.
_STRETCHES = np.array([stretch.py_func((k + 0.5) / _NUM_STRETCHES) for k in range(_NUM_STRETCHES)], np.float32)
_MOST_SHARE = _NUM_STRETCHES - 0.01


@lean
def sum_up(candidates: Candidates, num: int) -> tuple[float, int]:
    """All votes, and how many places have the longest match; by source they are written."""
    sums, num_longest_of, by_source = candidates.votes, candidates.num_longest, candidates.by_source
    total, num_longest = 0.0, 0
    for source in range(NUM_SOURCES):
        by_source[MAX_CANDIDATES, source] = 0.0
    for c in range(num):
        total += sums[c]
        num_longest += num_longest_of[c]
        for source in range(NUM_SOURCES):
            by_source[MAX_CANDIDATES, source] += by_source[c, source]
    return total, num_longest


@lean
def write_shares(shares: Float32Array, candidates: Candidates, c: int, share: float, num_longest: int) -> None:
    """A candidate's shares of the votes, stretched; see `features.NUM_VOTES`."""
    by_source = candidates.by_source
    shares[0] = _STRETCHES[int(share * _MOST_SHARE)]
    for source in range(NUM_SOURCES):
        whole = by_source[MAX_CANDIDATES, source]
        shares[1 + source] = 0.0
        if whole > 0:
            part = (by_source[c, source] / whole + _MEAN_SHARE) / (1 + 3 * _MEAN_SHARE)
            shares[1 + source] = _STRETCHES[int(part * _MOST_SHARE)]
    part = (candidates.num_longest[c] + 0.1) / (num_longest + 0.4)
    shares[1 + NUM_SOURCES] = _STRETCHES[int(part * _MOST_SHARE)]
