"""Packing: whole trees into micro-batches under a token budget.

Knows sizes, not models: a micro-batch is a forest plus the numbers of its branches. A tree is never cut here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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
    if max_tokens is not None and max_tokens < 1:
        raise InputError(f"max_tokens must be at least 1, got {max_tokens}")
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
    if max_tokens is None:
        return [list(range(len(sizes)))] if sizes else []
    bins: list[list[int]] = []
    room: list[int] = []
    for tree in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = next((i for i, free in enumerate(room) if free >= sizes[tree]), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[at].append(tree)
        room[at] -= sizes[tree]
    return sorted(sorted(members) for members in bins)
