"""Features of a candidate token: the order of the acceptance model's weights.

A candidate has one feature of each kind. Its logit of acceptance is the sum of the weights of its features and of its
vote fractions times their weights. General kinds mean the same with every tokenizer; the kinds after them depend on
token ids.
"""

import math
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.arrays import Int32Array, Int64Array
from treering.compiling.lean import lean

Source = Literal["history", "siblings", "own", "others"]
"""history: published rollouts of the prompt. siblings: running rollouts of the group. own: the row's own context.
others: published rollouts of other prompts, and running rollouts of other groups."""

SOURCES: tuple[Source, ...] = ("history", "siblings", "own", "others")
HISTORY, SIBLINGS, OWN, OTHERS = range(4)
NUM_SOURCES = 4
NUM_LENGTHS = 11
NUM_LENGTH_CLASSES = 7
"""Length buckets that are combined with an edit."""
NUM_EDITS = 5
NUM_SHIFTS = 6
FAR = NUM_SHIFTS - 1
"""Bucket of the largest shifts, and of matches whose shift is meaningless."""
NUM_RANKS = 4
NUM_SHARES = 10
NUM_COUNTS = 4
NUM_DEPTHS = 7
NUM_STATES = 4
"""Number of outcomes of the row's latest draft."""
NOT_TRIED, REFUSED, ACCEPTED, NO_DRAFT = range(NUM_STATES)
_NUM_STARTS = NUM_STATES + 2
NUM_NEAR = 4
NUM_HASHES = 1024
"""Hashes of single tokens, alone or combined with a small feature."""
NUM_PAIRS = 4 * NUM_HASHES
"""Hashes of pairs and triples of tokens."""

NUM_VOTES = 2 + NUM_SOURCES
"""Vote fractions of a candidate: of all matches by weight, of each source, and of the longest matches."""


class Kinds(NamedTuple):
    """A number for each kind of feature. The last six depend on token ids."""

    any: int
    """The same for all candidates."""
    match: int
    """Source of the strongest match, and length of the longest."""
    edit: int
    """Agreement after an edit, and the length."""
    shift: int
    """Distance of the strongest match's position from the row's."""
    share: int
    """Share of the votes, and the depth."""
    matches: int
    """Source, and the number of matches."""
    depth: int
    """Tokens drafted before it."""
    start: int
    """Outcome of the row's latest draft at the first token, the depth at others; and the length."""
    rank: int
    """Number of candidates with more votes."""
    outcome: int
    """Outcome of the row's latest draft, at the first token; and the source."""
    near: int
    """Depth and length."""
    before: int
    """Previous token."""
    token: int
    """The token."""
    pair: int
    """The token and the previous one."""
    triple: int
    """The token and the two before it."""
    token_source: int
    """The token, and the source."""
    token_length: int
    """The token, and the length."""


SIZES = Kinds(
    any=1,
    match=NUM_SOURCES * NUM_LENGTHS,
    edit=NUM_EDITS * NUM_LENGTH_CLASSES,
    shift=NUM_SHIFTS,
    share=NUM_SHARES * NUM_NEAR,
    matches=NUM_SOURCES * NUM_COUNTS,
    depth=NUM_DEPTHS,
    start=_NUM_STARTS * NUM_LENGTHS,
    rank=NUM_RANKS,
    outcome=(NUM_STATES + 1) * NUM_SOURCES,
    near=NUM_NEAR * NUM_LENGTHS,
    before=NUM_HASHES,
    token=NUM_HASHES,
    pair=NUM_PAIRS,
    triple=NUM_PAIRS,
    token_source=NUM_HASHES,
    token_length=NUM_HASHES,
)
"""Number of weights of each kind."""
NUM_KINDS = len(SIZES)
NUM_GENERAL_KINDS = Kinds._fields.index("before")
FIRST = Kinds(*accumulate(SIZES[:-1], initial=NUM_VOTES))
"""Index of the first weight of each kind; weights of vote fractions come before."""
NUM_WEIGHTS = NUM_VOTES + sum(SIZES)
KIND = Kinds(*range(NUM_KINDS))
"""Index of each kind among a candidate's features."""


@lean
def put_feature(features: Int32Array, kind: int, number: int) -> None:
    """Write the index of the weight of a candidate's feature of one kind, by its number within the kind."""
    features[kind] = FIRST[kind] + number


def sources_of(features: Int32Array) -> Int64Array:
    """Return the source of each candidate's strongest match, int64 [D], from its features [D, kinds]."""
    return (features[:, KIND.match].astype(np.int64) - FIRST.match) // NUM_LENGTHS


@lean
def hash_of(first: int, second: int, third: int, size: int) -> int:
    """Return a hash of three numbers, below `size`, a power of two."""
    mixed = first * 0x9E3779B1 + second * 0x85EBCA77 + third * 0xC2B2AE3D
    return ((mixed ^ (mixed >> 17)) * 0x27D4EB2F >> 15) & (size - 1)


def _buckets(*begins: int) -> NDArray[np.int64]:
    """Return the bucket of each number up to the last begin: how many buckets begin at or below it.

    Example: begins 1 and 3 put the numbers 0 to 3 into buckets 0, 1, 1, 2, and all greater ones into 2.
    """
    return np.searchsorted(begins, np.arange(begins[-1] + 1), side="right").astype(np.int64)


# Tables are several times faster than sums of comparisons, and branches are often mispredicted.
_LENGTHS = _buckets(1, 2, 3, 4, 5, 7, 10, 15, 23, 41)
_EDITS = _buckets(1, 3, 5, 9)
_SHIFTS = _buckets(0, 1, 3, 9, 33)
_DEPTHS = _buckets(1, 2, 3, 5, 9, 17)
_NEAR = _buckets(1, 3, 5)
_COUNTS = _buckets(2, 3, 5)


@lean
def length_bucket(length: int) -> int:
    """Return the bucket of a length: 0 to 4 have one each, then up to 6, 9, 14, 22, 40 and more."""
    return int(_LENGTHS[np.uintp(min(length, _LENGTHS.size - 1))])


@lean
def edit_bucket(length: int) -> int:
    """Return the bucket of the number of tokens that agree before an edit: 0, up to 2, 4, 8 and more."""
    return int(_EDITS[np.uintp(min(length, _EDITS.size - 1))])


@lean
def shift_bucket(shift: int) -> int:
    """Return the bucket of a match's position in its rollout minus the row's; bucket 0 is for the own context."""
    return int(_SHIFTS[np.uintp(min(abs(shift), _SHIFTS.size - 1))])


@lean
def depth_bucket(depth: int) -> int:
    """Return the bucket of the tokens drafted before: 0 to 2 have one each, then up to 4, 8, 16 and more."""
    return int(_DEPTHS[np.uintp(min(depth, _DEPTHS.size - 1))])


@lean
def near_bucket(depth: int) -> int:
    """Return a coarser bucket of the depth: 0, up to 2, 4 and more."""
    return int(_NEAR[np.uintp(min(depth, _NEAR.size - 1))])


@lean
def count_bucket(count: int) -> int:
    """Return the bucket of a number of matches: 1, up to 2, 4 and more."""
    return int(_COUNTS[np.uintp(min(count, _COUNTS.size - 1))])


@lean
def stretch(share: float) -> float:
    """Return log(share / (1 - share)), bounded to 9.2 either way.

    Example: 0.5 gives 0, 0.9 gives 2.197.
    """
    bounded = min(max(share, 1e-4), 1 - 1e-4)
    return math.log(bounded / (1 - bounded))


_MOST_LOGIT = 12.0
_NUM_SQUASHES = 64
"""Table entries per unit of a logit. Linear interpolation is off by at most 1 / (8 * 64**2) of the value."""
_SQUASHES = 1 / (1 + np.exp(_MOST_LOGIT - np.arange(2 * int(_MOST_LOGIT) * _NUM_SQUASHES + 2) / _NUM_SQUASHES))
_SLOPES = np.diff(_SQUASHES)
_BASES = _SQUASHES[:-1] - np.arange(_SLOPES.size) * _SLOPES
"""Values of the straight lines at table index 0."""


@lean
def squash(logit: float) -> float:
    """Return the inverse of `stretch` for logits between -12 and 12, to within 3.1e-5.

    Example: 0 gives 0.5, 2.197 gives 0.9.
    """
    # A table lookup, because the exponential function takes as long as computing the whole logit.
    position = (min(max(logit, -_MOST_LOGIT), _MOST_LOGIT) + _MOST_LOGIT) * _NUM_SQUASHES
    k = int(position)
    return float(_BASES[np.uintp(k)] + position * _SLOPES[np.uintp(k)])
