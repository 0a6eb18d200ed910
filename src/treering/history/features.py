"""What is known of a candidate token, as numbers of weights: the layout of the acceptance model.

Knows buckets. Knows nothing of texts and of what the weights are. A candidate has one feature of each kind; its kinds'
weights, and its shares of the votes times their own weights, add up to the logit of its acceptance.
"""

import math
from typing import Literal

import numpy as np

from treering.history.arena import NUM_AGES, NUM_REWARDS
from treering.history.lean import lean

Source = Literal["history", "siblings", "own", "others"]
"""history: published rollouts of the prompt. siblings: running rollouts of the group. own: the row's own context.
others: published rollouts of other prompts, and what is running of other groups."""

SOURCES: tuple[Source, ...] = ("history", "siblings", "own", "others")
HISTORY, SIBLINGS, OWN, OTHERS = range(4)
NUM_SOURCES = 4

NUM_LENGTHS = 11
NUM_EDITS = 5
NUM_SHIFTS = 6
FAR = NUM_SHIFTS - 1
"""The bucket of the largest shifts, and of places whose shift says nothing."""
NUM_RANKS = 4
NUM_SHARES = 10
NUM_COUNTS = 4
NUM_DEPTHS = 7
NUM_STATES = 4
"""What the row's latest draft came to."""
NOT_TRIED, REFUSED, ACCEPTED, NO_DRAFT = range(NUM_STATES)
_NUM_STARTS = NUM_STATES + 2
_NUM_NEAR = 4
_NUM_CROWDS = 8
NUM_HASHES = 2048
NUM_PAIRS = 4 * NUM_HASHES
NUM_GENERAL_KINDS = 14

SIZES = (
    1,
    NUM_SOURCES * NUM_LENGTHS,
    NUM_EDITS * 7,
    NUM_SHIFTS,
    NUM_AGES * NUM_REWARDS * 2,
    NUM_SHARES * _NUM_NEAR,
    NUM_COUNTS * NUM_SOURCES,
    NUM_DEPTHS,
    _NUM_STARTS * NUM_LENGTHS,
    NUM_RANKS,
    (NUM_STATES + 1) * NUM_SOURCES,
    _NUM_NEAR * NUM_LENGTHS,
    _NUM_NEAR * NUM_SHIFTS,
    _NUM_NEAR * _NUM_CROWDS,
    NUM_HASHES,
    NUM_HASHES,
    NUM_PAIRS,
    NUM_PAIRS,
    NUM_PAIRS,
    NUM_PAIRS,
)
"""Weights of each kind of feature."""
NUM_KINDS = len(SIZES)
FIRST = tuple(int(first) for first in np.cumsum([0, *SIZES[:-1]]))
NUM_GENERAL = FIRST[NUM_GENERAL_KINDS]
"""Weights that mean the same with every tokenizer; behind them stand those of single tokens."""
NUM_WEIGHTS = FIRST[-1] + SIZES[-1]
NUM_VOTES = 2 + NUM_SOURCES
"""Shares of a candidate: among all places by their weights, in each source, among the places of the longest match."""


@lean
def hash_of(first: int, second: int, third: int) -> int:
    """A number below NUM_PAIRS that three others fall to."""
    mixed = first * 0x9E3779B1 + second * 0x85EBCA77 + third * 0xC2B2AE3D
    return ((mixed ^ (mixed >> 17)) * 0x27D4EB2F >> 15) & (NUM_PAIRS - 1)


@lean
def length_bucket(length: int) -> int:
    """0 to 4 as they are, then 6, 9, 14, 22, 40 and more."""
    if length <= 4:
        return length
    if length <= 6:
        return 5
    if length <= 9:
        return 6
    if length <= 14:
        return 7
    if length <= 22:
        return 8
    return 9 if length <= 40 else 10


@lean
def edit_bucket(length: int) -> int:
    """By how many tokens agree behind one edit: 0, 2, 4, 8 and more."""
    if length == 0:
        return 0
    if length <= 2:
        return 1
    if length <= 4:
        return 2
    return 3 if length <= 8 else 4


@lean
def shift_bucket(shift: int) -> int:
    """By how much a place stands elsewhere in its rollout than the row in its own; 0 is left for own context."""
    shift = abs(shift)
    if shift == 0:
        return 1
    if shift <= 2:
        return 2
    if shift <= 8:
        return 3
    return 4 if shift <= 32 else FAR


@lean
def rank_bucket(rank: int) -> int:
    """0, 1, 3 and more."""
    if rank <= 1:
        return rank
    return 2 if rank <= 3 else 3


@lean
def depth_bucket(depth: int) -> int:
    """Tokens drafted before: 0 to 2 as they are, then 4, 8, 16 and more."""
    if depth <= 2:
        return depth
    if depth <= 4:
        return 3
    if depth <= 8:
        return 4
    return 5 if depth <= 16 else 6


@lean
def near_bucket(depth: int) -> int:
    """A coarser one: 0, 2, 4 and more."""
    if depth == 0:
        return 0
    if depth <= 2:
        return 1
    return 2 if depth <= 4 else 3


@lean
def count_bucket(count: int) -> int:
    """1, 2, 4 and more."""
    if count <= 2:
        return count - 1
    return 2 if count <= 4 else 3


@lean
def crowd_bucket(num_places: int) -> int:
    """By powers of two."""
    bucket = 0
    while num_places >= 1 and bucket < 7:
        num_places >>= 1
        bucket += 1
    return bucket


@lean
def stretch(share: float) -> float:
    """log(share / (1 - share)), at most 9.2 either way.

    Example: 0.5 gives 0, 0.9 gives 2.197.
    """
    bounded = min(max(share, 1e-4), 1 - 1e-4)
    return math.log(bounded / (1 - bounded))


@lean
def squash(logit: float) -> float:
    """The inverse of `stretch`, from logits between -12 and 12."""
    return 1 / (1 + math.exp(-min(max(logit, -12.0), 12.0)))
