"""Count what a forest saves over training its branches separately (tokens, attention pairs, FLOPs), and its shape.

Counts are Python integers, so nothing overflows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from treering.tree import radix
from treering.tree.forest import Forest
from treering.types import ModelShape

_PART_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Tokens and attention pairs of one computation; supports addition.

    Example: three tokens in a row are `Work(num_tokens=3, num_pairs=6)`: the first sees 1 token, the last 3.
    """

    num_tokens: int
    """Tokens computed."""
    num_pairs: int
    """(query, visible key) pairs, a token's own key included."""

    def __add__(self, other: "Work") -> "Work":
        return Work(num_tokens=self.num_tokens + other.num_tokens, num_pairs=self.num_pairs + other.num_pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Best possible speedups of a forest over its branches trained separately; 1.0 for an empty forest."""

    token_bound: float
    """Flat tokens over distinct tokens."""
    flop_bound: float
    """FLOPs of the flat tokens over FLOPs of the distinct ones, attention included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """The shape of one or more forests. Lengths are tokens; all figures are 0 for empty forests."""

    num_leaves: int
    """Tokens without children."""
    num_branch_points: int
    """Tokens with two or more children."""
    max_depth: int
    """Tokens on the longest path."""
    max_segments: int
    """Most segments on any path."""
    num_segments: int
    """Maximal unbranched runs."""
    median_segment_length: float
    mean_segment_length: float
    p90_segment_length: float
    max_segment_length: int


def visible_pairs(forest: Forest) -> int:
    """Count the attention pairs when every distinct token is computed once: each sees its ancestors and itself.

    Example: `[5, 6, 7]` and `[5, 6, 8]` have 1 + 2 + 3 + 3 = 9.
    """
    return int(forest.position.sum(dtype=np.int64)) + forest.num_tokens


def tree_work(forests: Iterable[Forest]) -> Work:
    """Return the work of computing each distinct token of each forest once."""
    parts = (Work(num_tokens=forest.num_tokens, num_pairs=visible_pairs(forest)) for forest in forests)
    return sum(parts, start=Work(num_tokens=0, num_pairs=0))


def flat_work(lengths: npt.NDArray[np.integer[Any]]) -> Work:
    """Return the work of separate sequences of these lengths, int [K].

    Example: lengths 3 and 3 are 6 tokens and 12 pairs.
    """
    wide = lengths.astype(np.int64)
    return Work(num_tokens=int(wide.sum()), num_pairs=int((wide * (wide + 1) // 2).sum()))


def merged_work(
    flat: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], after_part: Callable[[], None] = lambda: None
) -> Work:
    """Return the work of sequences merged in one forest, without building it; memory does not grow with their tokens.

    Args:
        flat: int32 [F], the tokens of all sequences one after another.
        offsets: int64 [K + 1], where each begins.
        after_part: called after every few million tokens; it may release mapped memory of `flat`.

    Example:
        >>> merged_work(np.array([5, 6, 7, 5, 6, 8], np.int32), np.array([0, 3, 6]))
        Work(num_tokens=4, num_pairs=9)
    """
    builder = radix.RadixTreeBuilder(flat, offsets)
    bounds = np.searchsorted(offsets, np.arange(0, offsets[-1] + _PART_TOKENS, _PART_TOKENS)).tolist()
    for stop in sorted({min(bound, offsets.size - 1) for bound in [*bounds, offsets.size - 1] if bound > 0}):
        builder.insert(stop)
        after_part()
    num_tokens, num_pairs = radix.count_work(builder.tree())
    return Work(num_tokens=num_tokens, num_pairs=num_pairs)


def train_flops(shape: ModelShape, num_tokens: int, num_pairs: int) -> int:
    """Return the FLOPs of forward and backward.

    They are 3 x (2 x parameters per token x tokens + 4 x layers x heads x head size x pairs).

    Example: qwen3-8b over 1,000 tokens in a row (500,500 pairs) takes 4.63e13.
    """
    matmuls = 2 * shape.params_per_token * num_tokens
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_size * num_pairs
    return 3 * (matmuls + attention)


def work_bounds(flat: Work, tree: Work, shape: ModelShape) -> Bounds:
    """Return the best possible speedups of the work `tree` over the work `flat` with a model of that shape.

    Example: a prompt of 1,024 tokens with 8 responses of 64 has 8,704 flat and 1,536 distinct tokens: token bound 5.67.
    With 2 layers of hidden size 256 the FLOP bound, which includes attention, is 5.30.
    """
    if tree.num_tokens == 0:
        return Bounds(token_bound=1.0, flop_bound=1.0)
    flat_flops = train_flops(shape, flat.num_tokens, flat.num_pairs)
    return Bounds(
        token_bound=flat.num_tokens / tree.num_tokens,
        flop_bound=flat_flops / train_flops(shape, tree.num_tokens, tree.num_pairs),
    )


class BranchingCounter:
    """Sum of the shapes of forests; of each forest it keeps only the lengths of the segments.

    Example:
        >>> counter = BranchingCounter()
        >>> counter.add(Forest.from_sequences([[5, 6, 7], [5, 6, 8, 9]]))
        >>> shape = counter.total()
        >>> shape.num_leaves, shape.num_branch_points, shape.max_depth, shape.max_segment_length
        (2, 1, 4, 2)
    """

    def __init__(self) -> None:
        self._num_leaves = self._num_branch_points = self._max_depth = self._max_segments = 0
        self._lengths: list[npt.NDArray[np.int32]] = []

    def add(self, forest: Forest) -> None:
        """Count a forest."""
        if forest.num_tokens == 0:
            return
        self._num_leaves += _num_leaves(forest)
        self._num_branch_points += _num_branch_points(forest)
        self._max_depth = max(self._max_depth, int(forest.position.max()) + 1)
        self._max_segments = max(self._max_segments, _max_segments(forest))
        bounds = np.append(forest.segment_start, np.int32(forest.num_tokens))
        self._lengths.append(bounds[1:] - bounds[:-1])

    def total(self) -> Branching:
        """Return the shape of all forests together."""
        if not self._lengths:
            return Branching(**dict.fromkeys(Branching.__slots__, 0))
        lengths = np.concatenate(self._lengths)
        return Branching(
            num_leaves=self._num_leaves,
            num_branch_points=self._num_branch_points,
            max_depth=self._max_depth,
            max_segments=self._max_segments,
            num_segments=lengths.size,
            median_segment_length=float(np.median(lengths)),
            mean_segment_length=float(lengths.mean()),
            p90_segment_length=float(np.percentile(lengths, 90)),
            max_segment_length=int(lengths.max()),
        )


def _num_leaves(forest: Forest) -> int:
    return int((forest.subtree_end == np.arange(1, forest.num_tokens + 1)).sum())


def _num_branch_points(forest: Forest) -> int:
    num_children = np.bincount(forest.parent[forest.parent >= 0], minlength=forest.num_tokens)
    return int((num_children > 1).sum())


def _max_segments(forest: Forest) -> int:
    depths: list[int] = []
    for parent in forest.segment_parent.tolist():
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths)
