"""A candidate's shares of a node's votes: among all matches, in each source, among the longest matches."""

import numpy as np

from treering.arrays import Float32Array
from treering.history.draft.workspace import MAX_CANDIDATES, Candidates
from treering.history.features import NUM_SOURCES, stretch
from treering.lean import lean

_MEAN_SHARE = 0.02
_SHRINK = 1 / (1 + 3 * _MEAN_SHARE)
_NUM_STRETCHES = 1024
# Made once: a logarithm for each share of each candidate would take longer than all the rest of it.
_STRETCHES = np.array([stretch.py_func((k + 0.5) / _NUM_STRETCHES) for k in range(_NUM_STRETCHES)], np.float32)
_MOST_SHARE = _NUM_STRETCHES - 0.01
_ALL = _STRETCHES[int((1 + _MEAN_SHARE) * _SHRINK * _MOST_SHARE)]
"""The share of the only candidate of a source."""


@lean
def sum_up(candidates: Candidates, num: int) -> tuple[float, int]:
    """All votes, and how many matches are the longest. With several candidates, also writes the votes by source."""
    if num == 1:
        return candidates[0].votes, candidates[0].num_longest
    by_source = candidates[MAX_CANDIDATES].by_source
    total, num_longest = 0.0, 0
    for source in range(NUM_SOURCES):
        by_source[source] = 0.0
    for c in range(num):
        candidate = candidates[c]
        total += candidate.votes
        num_longest += candidate.num_longest
        for source in range(NUM_SOURCES):
            by_source[source] += candidate.by_source[source]
    return total, num_longest


@lean
def write_shares(
    shares: Float32Array, candidates: Candidates, c: int, num: int, share: float, num_longest: int
) -> None:
    """The shares of the votes of one of so many candidates, stretched; see `features.NUM_VOTES`."""
    own, whole = candidates[np.uintp(c)].by_source, candidates[MAX_CANDIDATES].by_source
    shares[0] = _STRETCHES[np.uintp(int(share * _MOST_SHARE))]
    for source in range(NUM_SOURCES):
        shares[1 + source] = 0.0
        if num == 1:
            shares[1 + source] = _ALL if own[source] > 0 else 0.0
        elif whole[source] > 0:
            part = (own[source] / whole[source] + _MEAN_SHARE) * _SHRINK
            shares[1 + source] = _STRETCHES[np.uintp(int(part * _MOST_SHARE))]
    part = (candidates[np.uintp(c)].num_longest + 0.1) / (num_longest + 0.4)
    shares[1 + NUM_SOURCES] = _STRETCHES[np.uintp(int(part * _MOST_SHARE))]
