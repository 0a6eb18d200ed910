"""Plan an optimizer batch: pack trees into micro-batches and cut those that are over the budget.

Planning uses sizes, never measured times, so equal inputs give equal plans. `share_among_ranks` assigns forests to
ranks.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError
from treering.tree.forest import Forest
from treering.tree.partition import PartitionedTree, cut_tree, pack
from treering.types import is_count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Trees that are computed together.

    Attributes:
        forest: the trees side by side; empty in a micro-batch that only keeps the number of passes equal across ranks.
        branches: int64 [K] index of each of its branches among all branches of the plan, in the forest's order.
    """

    forest: Forest
    branches: NDArray[np.int64]

    def __post_init__(self) -> None:
        assert self.branches.shape == (self.forest.num_branches,)


Unit = MicroBatch | PartitionedTree
"""Work computed in one go: trees side by side, or one tree in partitions."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """How an optimizer batch is computed, and what that saves.

    Attributes:
        micro_batches: in the order in which they run.
        max_tokens: most distinct tokens of a micro-batch or partition; None for no limit.
        partitioned: trees over the budget.
        ranks: how ranks that train one model stay in step: "sharded" or "gathered" (`treering.ranks`); None on one.
    """

    micro_batches: tuple[MicroBatch, ...]
    max_tokens: int | None
    partitioned: tuple[PartitionedTree, ...] = ()
    ranks: str | None = None

    @property
    def units(self) -> tuple[Unit, ...]:
        """Work in the order in which it runs: micro-batches, then partitioned trees."""
        return (*self.micro_batches, *self.partitioned)

    @property
    def forests(self) -> tuple[Forest, ...]:
        """Forest of each unit."""
        return tuple(unit.forest for unit in self.units)

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return sum(forest.num_tokens for forest in self.forests)

    @property
    def num_branch_tokens(self) -> int:
        """Tokens that are computed when every branch is trained separately."""
        return sum(forest.num_branch_tokens for forest in self.forests)

    @property
    def num_branches(self) -> int:
        """Sequences in the batch."""
        return sum(forest.num_branches for forest in self.forests)

    @property
    def num_micro_batches(self) -> int:
        """Forward passes: micro-batches, with the empty ones, and partitions."""
        return len(self.micro_batches) + sum(len(tree.partitions) for tree in self.partitioned)

    @property
    def sharing(self) -> float:
        """1 - computed / flat tokens; 0.0 for an empty plan."""
        flat = self.num_branch_tokens
        return 1.0 - self.num_tokens / flat if flat else 0.0

    def in_words(self) -> str:
        """Return one line for a log: sharing, and numbers of passes."""
        return (
            f"{self.num_tokens:,} of {self.num_branch_tokens:,} tokens are computed (sharing {self.sharing:.2f}), in "
            f"{len(self.micro_batches)} micro-batches and {len(self.partitioned)} partitioned trees"
            + ("" if self.ranks is None else f"; ranks are {self.ranks}")
        )


def plan_batch(
    forests: Sequence[Forest],
    max_tokens: int | None = None,
    *,
    fill_tokens: int | None = None,
    cut_tokens: int | None = None,
) -> Plan:
    """Plan the trees of `forests`: micro-batches and partitions of at most `max_tokens` tokens.

    Whole trees go into micro-batches by first-fit decreasing: at most 11/9 of the fewest, plus one. A tree over the
    budget is cut into partitions. Equal inputs give equal plans.

    Args:
        forests: branches are numbered through all of them in order.
        max_tokens: None computes everything at once.
        fill_tokens: most tokens of several trees together; a larger tree is alone in its micro-batch. None fills up to
            `max_tokens`.
        cut_tokens: a larger tree is cut into partitions of at most this many tokens, even if it fits `max_tokens`.

    Raises:
        InputError: a budget below 1.

    Example: trees of 5, 4 and 3 tokens under a budget of 8 give two micro-batches: {5, 3} and {4}.
    """
    limits = {"max_tokens": max_tokens, "fill_tokens": fill_tokens, "cut_tokens": cut_tokens}
    for name, value in limits.items():
        if value is not None and not is_count(value, least=1):
            raise InputError(f"{name} must be an integer of at least 1, or None, got {value!r}")
    if cut_tokens is not None:
        # Smaller partitions only make it faster, and an image is never cut.
        cut_tokens = max([cut_tokens, *(image.num_tokens for forest in forests for image in forest.images)])
    max_tokens = _least(max_tokens, cut_tokens)
    trees, branches = _trees(forests)
    is_cut = [max_tokens is not None and tree.num_tokens > max_tokens for tree in trees]
    partitioned = tuple(
        PartitionedTree(forest=trees[i], branches=branches[i], partitions=cut_tree(trees[i], max_tokens))
        for i in np.flatnonzero(is_cut)
        if max_tokens is not None
    )
    whole = np.flatnonzero(~np.array(is_cut, bool))
    sizes = np.array([tree.num_tokens for tree in trees], np.int64)
    bins = _bins(whole, sizes, max_tokens, fill_tokens)
    return Plan(
        micro_batches=tuple(
            MicroBatch(
                forest=Forest.concatenate([trees[i] for i in bin]),
                branches=np.concatenate([np.empty(0, np.int64), *(branches[i] for i in bin)]),
            )
            for bin in bins
        ),
        max_tokens=max_tokens,
        partitioned=partitioned,
    )


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _trees(forests: Sequence[Forest]) -> tuple[list[Forest], list[NDArray[np.int64]]]:
    trees: list[Forest] = []
    branches: list[NDArray[np.int64]] = []
    first_branch = 0
    for forest in forests:
        trees.extend(forest.trees())
        branches.extend(first_branch + members for members in forest.branches_by_tree())
        first_branch += forest.num_branches
    return trees, branches


def _bins(
    whole: NDArray[np.int64], sizes: NDArray[np.int64], max_tokens: int | None, fill_tokens: int | None
) -> list[list[int]]:
    """Return each micro-batch as tree indices; trees and micro-batches are in input order."""
    room = _least(max_tokens, fill_tokens)
    if whole.size == 0 or room is None:
        return [whole.tolist()] if whole.size else []
    alone, together = whole[sizes[whole] > room], whole[sizes[whole] <= room]
    bins = np.array(pack(sizes[together].tolist(), room), np.int64)
    members = np.split(together[np.argsort(bins, kind="stable")], np.cumsum(np.bincount(bins))[:-1])
    return sorted([[tree] for tree in alone.tolist()] + [trees.tolist() for trees in members if trees.size])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankShare:
    """What one rank trains.

    Attributes:
        forests: int64, indices of its forests, ascending; a rank may have none.
        cost: its number of distinct tokens.
    """

    forests: NDArray[np.int64]
    cost: float


def share_among_ranks(forests: Sequence[Forest], num_ranks: int) -> tuple[RankShare, ...]:
    """Assign every forest to one rank: the largest first, each to the rank with the fewest tokens so far.

    The most tokens of a rank are at most 4/3 of the optimum. Equal forests give equal shares, so that every rank
    computes all shares by itself.

    Args:
        forests: those of the whole optimizer batch; a forest is never split.
        num_ranks: at least 1.

    Raises:
        InputError: `num_ranks` is below 1.

    Example: forests of 5, 4, 3 and 3 tokens on two ranks give {5, 3} and {4, 3}.
    """
    if not is_count(num_ranks, least=1):
        raise InputError(f"num_ranks must be an integer of at least 1, got {num_ranks!r}")
    prices = [float(forest.num_tokens) for forest in forests]
    members: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for number in sorted(range(len(forests)), key=lambda i: -prices[i]):
        load, rank = heapq.heappop(loads)
        members[rank].append(number)
        heapq.heappush(loads, (load + prices[number], rank))
    return tuple(
        RankShare(forests=np.array(sorted(own), np.int64), cost=float(sum(prices[i] for i in own))) for own in members
    )
