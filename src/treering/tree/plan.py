"""Packing: whole trees into micro-batches under a token budget.

Knows sizes, not models: a micro-batch is a forest plus the numbers of its branches. A tree is never cut here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treering.errors import InputError
from treering.tree.forest import Forest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Trees that are computed at one time.

    Attributes:
        forest: the trees side by side.
        branches: int64 [K] number of each of its branches among all branches of the plan, in the forest's order.
    """

    forest: Forest
    branches: NDArray[np.int64]

    def __post_init__(self) -> None:
        assert self.branches.shape == (self.forest.num_branches,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """How an optimizer batch is cut into micro-batches, and what it saves.

    Attributes:
        micro_batches: in the order in which they run.
        max_tokens: the budget of distinct tokens that each keeps, None for no limit.
    """

    micro_batches: tuple[MicroBatch, ...]
    max_tokens: int | None

    @property
    def num_tokens(self) -> int:
        """Distinct tokens that are computed."""
        return sum(batch.forest.num_tokens for batch in self.micro_batches)

    @property
    def num_branch_tokens(self) -> int:
        """Tokens that training every branch separately would compute."""
        return sum(batch.forest.num_branch_tokens for batch in self.micro_batches)

    @property
    def num_branches(self) -> int:
        """Sequences in the batch."""
        return sum(batch.forest.num_branches for batch in self.micro_batches)

    @property
    def sharing(self) -> float:
        """1 - distinct / flat tokens; 0.0 for an empty plan."""
        flat = self.num_branch_tokens
        return 1.0 - self.num_tokens / flat if flat else 0.0


def plan_batch(forests: Sequence[Forest], max_tokens: int | None = None) -> Plan:
    """Packs the trees of `forests` into micro-batches of at most `max_tokens` distinct tokens.

    First fit by falling size: never more than 11/9 of the fewest possible micro-batches (plus one). Branches are
    numbered through all forests in order. Deterministic.

    Raises:
        InputError: a tree larger than the budget, or a budget below one.

    Example: trees of 5, 4 and 3 tokens under a budget of 8 give two micro-batches: {5, 3} and {4}.
    """
    if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens >= 1):
        raise InputError(f"max_tokens must be an integer of at least 1, or None, got {max_tokens!r}")
    trees, branches = _trees(forests)
    sizes = [tree.num_tokens for tree in trees]
    _check_sizes(sizes, max_tokens)
    return Plan(
        micro_batches=tuple(
            MicroBatch(
                forest=Forest.concatenate([trees[i] for i in members]),
                branches=np.concatenate([branches[i] for i in members]),
            )
            for members in _first_fit(sizes, max_tokens)
        ),
        max_tokens=max_tokens,
    )


def _trees(forests: Sequence[Forest]) -> tuple[list[Forest], list[NDArray[np.int64]]]:
    trees: list[Forest] = []
    branches: list[NDArray[np.int64]] = []
    first_branch = 0
    for forest in forests:
        trees.extend(forest.trees())
        branches.extend(first_branch + members for members in forest.branches_by_tree())
        first_branch += forest.num_branches
    return trees, branches


def _check_sizes(sizes: Sequence[int], max_tokens: int | None) -> None:
    if max_tokens is None or not sizes or max(sizes) <= max_tokens:
        return
    largest = int(np.argmax(sizes))
    raise InputError(
        f"tree {largest} has {sizes[largest]} distinct tokens, more than max_tokens={max_tokens}, and a tree is "
        f"computed whole: raise max_tokens to at least {max(sizes)}, or drop or shorten its sequences"
    )


def _first_fit(sizes: Sequence[int], max_tokens: int | None) -> list[list[int]]:
    """Bins of tree numbers, members and bins in input order."""
    if not sizes:
        return []
    if max_tokens is None:
        return [list(range(len(sizes)))]
    by_size = np.argsort(-np.asarray(sizes, np.int64), kind="stable")
    bin_of = np.empty(len(sizes), np.int64)
    bin_of[by_size] = _first_fit_bins(np.asarray(sizes, np.int64)[by_size], max_tokens)
    members = np.split(np.argsort(bin_of, kind="stable"), np.cumsum(np.bincount(bin_of))[:-1])
    return sorted(trees.tolist() for trees in members)


@njit(cache=True)
def _first_fit_bins(sizes: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The bin that each size goes into: the first with room for it, or a new one."""
    bins = np.empty(sizes.size, np.int64)
    room = np.full(sizes.size, capacity, np.int64)
    for i in range(sizes.size):
        at = 0
        while room[at] < sizes[i]:
            at += 1
        bins[i] = at
        room[at] -= sizes[i]
    return bins
