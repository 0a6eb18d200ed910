"""Partitions: the parts in which a tree over the token budget is computed, and their parents."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError
from treering.tree.forest import Forest
from treering.tree.pictures import picture_spans
from treering.tree.plan.grouping import search_cuts
from treering.types import is_count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """Tokens of one tree that are computed at one time.

    It may have several subtrees. All hang off tokens of one other partition, its parent, so the partitions of a tree
    form a tree themselves.

    Attributes:
        tokens: int32 [M] packed indices of its tokens in the tree, ascending.
        parent: number of its parent among the tree's partitions, smaller than its own; -1 for the top one.
    """

    tokens: NDArray[np.int32]
    parent: int

    def __post_init__(self) -> None:
        assert self.tokens.size > 0, "a partition without tokens"
        self.tokens.flags.writeable = False

    @property
    def num_tokens(self) -> int:
        """M, the number of tokens that it computes."""
        return self.tokens.size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartitionedTree:
    """One tree in partitions; every token is in exactly one of them.

    Attributes:
        forest: the whole tree.
        branches: int64 [K] number of each of its branches among all branches of the plan, in the forest's order.
        partitions: parents before children, depth-first.
    """

    forest: Forest
    branches: NDArray[np.int64]
    partitions: tuple[Partition, ...]

    def __post_init__(self) -> None:
        assert self.branches.shape == (self.forest.num_branches,)
        assert sum(part.num_tokens for part in self.partitions) == self.forest.num_tokens
        assert all(-1 <= part.parent < number for number, part in enumerate(self.partitions))

    @property
    def chain_tokens(self) -> int:
        """Tokens of the longest chain of partitions from the top to a lowest one: the peak when parents are kept."""
        depths: list[int] = []
        for part in self.partitions:
            depths.append(part.num_tokens + (depths[part.parent] if part.parent >= 0 else 0))
        return max(depths)


def cut_tree(tree: Forest, max_tokens: int) -> tuple[Partition, ...]:
    """Cuts one tree into the fewest partitions of at most `max_tokens` tokens that it finds, in short chains.

    A cut may fall anywhere but inside a picture. Two policies compete, in O(n log n) time: cuts at forks, and full
    parts that end inside segments.

    Raises:
        InputError: a forest that is not one tree, a budget below 1, or below the tokens of a picture.

    Example: one sequence of 10 tokens and a budget of 4 give partitions of 2, 4 and 4 tokens, each under the last.
    """
    if tree.num_trees != 1:
        raise InputError(f"partitions cut one tree, got a forest of {tree.num_trees}: cut each of forest.trees()")
    if not is_count(max_tokens, least=1):
        raise InputError(f"max_tokens of a partition must be an integer of at least 1, got {max_tokens!r}")
    wholes = picture_spans(tree)
    largest = max((stop - first for first, stop in wholes), default=0)
    if largest > max_tokens:
        raise InputError(
            f"a picture is never cut, and one of {largest} tokens does not fit max_tokens={max_tokens} of a partition: "
            f"raise max_tokens to {largest} at least, or make pictures smaller"
        )
    start, parent = tree.segment_start.tolist(), tree.segment_parent.tolist()
    runs, grouping = search_cuts(start, parent, tree.num_tokens, max_tokens, wholes)
    number, partition_parent = _depth_first(grouping.parent)
    of_token = np.repeat(number[grouping.partition], [run.stop - run.start for run in runs])
    order = np.argsort(of_token, kind="stable").astype(np.int32)
    tokens = np.split(order, np.cumsum(np.bincount(of_token))[:-1])
    return tuple(Partition(tokens=part, parent=above) for part, above in zip(tokens, partition_parent, strict=True))


def _depth_first(parent: list[int]) -> tuple[NDArray[np.int64], list[int]]:
    """New number of each partition in depth-first pre-order, and the parents of the new numbers."""
    children: list[list[int]] = [[] for _ in parent]
    for child, above in enumerate(parent):
        if above >= 0:
            children[above].append(child)
    number = np.empty(len(parent), np.int64)
    parents: list[int] = []
    stack = [(0, -1)]
    while stack:
        old, above = stack.pop()
        number[old] = len(parents)
        stack.extend((child, len(parents)) for child in reversed(children[old]))
        parents.append(above)
    return number, parents
