"""Data-parallel balance: which rank trains which forests, by estimated cost."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError
from treering.tree.forest import Forest
from treering.tree.plan.costs import CostModel
from treering.types import is_count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankShare:
    """What one rank trains.

    Attributes:
        forests: int64, numbers of its forests, ascending; a rank may have none.
        cost: its estimated seconds; its distinct tokens without a cost model.
    """

    forests: NDArray[np.int64]
    cost: float


def share_among_ranks(
    forests: Sequence[Forest], num_ranks: int, costs: CostModel | None = None
) -> tuple[RankShare, ...]:
    """Assigns every forest to one rank: the costliest first, each to the rank with the least cost so far.

    The largest cost of a rank is at most 4/3 of the optimum. Deterministic: every rank computes all shares by itself,
    from the same forests and the same stored cost model.

    Args:
        forests: of the whole optimizer batch; a forest is never split.
        num_ranks: at least 1.
        costs: the cost model that each rank plans with; None balances distinct tokens.

    Raises:
        InputError: `num_ranks` is below 1.

    Example: forests of 5, 4, 3 and 3 tokens on two ranks give {5, 3} and {4, 3}.
    """
    if not is_count(num_ranks, least=1):
        raise InputError(f"num_ranks must be an integer of at least 1, got {num_ranks!r}")
    prices = [_price(forest, costs) for forest in forests]
    members: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for number in sorted(range(len(forests)), key=lambda i: -prices[i]):
        load, rank = heapq.heappop(loads)
        members[rank].append(number)
        heapq.heappush(loads, (load + prices[number], rank))
    return tuple(
        RankShare(forests=np.array(sorted(own), np.int64), cost=float(sum(prices[i] for i in own))) for own in members
    )


def _price(forest: Forest, costs: CostModel | None) -> float:
    if costs is None:
        return float(forest.num_tokens)
    # A tree that costs more than its branches is planned as chains.
    return sum(min(costs.of(tree), costs.of_branches(tree)) for tree in forest.trees())
