"""Plans: how each step's rollouts are split among workers, as data that a search can vary.

R rollouts of a step, W workers
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from treering.errors import ConfigError
from treering.schedule.cluster import Cluster
from treering.schedule.plan.placement import balanced, equal_counts, equal_sums, longest_first
from treering.schedule.plan.tiers import share_out
from treering.schedule.policy import Assignment, Moving, Stealing

Placing = Literal["balanced", "equal_counts", "equal_sums", "two_tier"]
"""How ranked rollouts become workers' shares. balanced: the longest first, each to the worker with the fewest predicted
tokens. equal_counts: ranges of ranks, as many rollouts each (RhymeRL's Tier 1). equal_sums: ranges of ranks, as many
tokens each. two_tier: eight ranges of ranks with as many rollouts each, on as many workers as each needs (Tier 2)."""

_NUM_GROUPS = 8
"""Of two_tier, where there are as many workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to share out every step.

    Example: `Plan(name="halves", num_turns=2)` runs odd steps on the odd workers and even steps on the others.
    """

    name: str
    """As reports call it."""
    num_turns: int = 1
    """Workers w with w = step modulo num_turns run a step; the others leave it out. 1: all run every step."""
    placing: Placing = "balanced"
    """See `Placing`."""
    long_share: float = 0.0
    """Share of the rollouts, the longest, that has workers of its own; 0 where all share all workers."""
    num_long_workers: int = 0
    """Workers of a step that run its longest rollouts, and nothing else; the others keep one at least."""
    stealing: Stealing = "off"
    """Passed on."""
    moving: Moving = "off"
    """Passed on."""

    def __post_init__(self) -> None:
        if self.num_turns < 1 or not 0 <= self.long_share < 1 or (self.long_share > 0) != (self.num_long_workers > 0):
            raise ConfigError(
                f"a plan takes turns of at least one, and either has no long rollouts or a share below 1 with workers, "
                f"got num_turns={self.num_turns}, long_share={self.long_share}, num_long_workers="
                f"{self.num_long_workers}; correct it"
            )


def place(
    plan: Plan, lengths: NDArray[np.float64], prompts: NDArray[np.int64], *, step: int, cluster: Cluster
) -> Assignment:
    """A step's assignment.

    Ranges of ranks rise with the worker's number in odd steps and fall in even ones, so that a worker with short
    rollouts now has long ones next (RhymeRL section 6.2).

    Args:
        plan: what to do.
        lengths: float64 [R] > 0: believed lengths.
        prompts: int64 [R]: number of each one's prompt.
        step: from 1.
        cluster: W workers, all of them.

    Example: lengths [9, 1, 1, 1] with equal counts on two workers: [1, 1, 0, 0] in step 1, [0, 0, 1, 1] in step 2.
    """
    order = longest_first(lengths, prompts)
    mine = np.arange(step % plan.num_turns, cluster.num_workers, plan.num_turns)
    if plan.placing == "balanced":
        workers = _with_lanes(plan, order, lengths, mine)
    else:
        workers = _by_ranges(plan.placing, order[::-1], lengths, mine if step % 2 else mine[::-1], cluster)
    return Assignment(
        workers=workers.astype(np.int32),
        order=order,
        stealing="off" if cluster.rebalancing == "none" else plan.stealing,
        moving=plan.moving if cluster.rebalancing == "running" else "off",
        beliefs=lengths,
    )


def _with_lanes(
    plan: Plan, order: NDArray[np.int64], lengths: NDArray[np.float64], mine: NDArray[np.int64]
) -> NDArray[np.int64]:
    workers = np.empty(lengths.size, np.int64)
    num_lanes = min(plan.num_long_workers, mine.size - 1)
    num_long = round(plan.long_share * lengths.size) if num_lanes else 0
    lanes, rest = mine[:num_lanes], mine[num_lanes:]
    for part, own in ((order[:num_long], lanes), (order[num_long:], rest)):
        workers[part] = own[balanced(part, lengths, own.size)]
    return workers


def _by_ranges(
    placing: Placing,
    rising: NDArray[np.int64],
    lengths: NDArray[np.float64],
    mine: NDArray[np.int64],
    cluster: Cluster,
) -> NDArray[np.int64]:
    if placing == "equal_counts":
        return mine[equal_counts(rising, mine.size)]
    if placing == "equal_sums":
        return mine[equal_sums(rising, lengths, mine.size)]
    groups = np.array_split(rising, min(_NUM_GROUPS, mine.size, rising.size))
    counts = share_out([lengths[group] for group in groups], replace(cluster, num_workers=mine.size))
    workers = np.empty(lengths.size, np.int64)
    for group, own in zip(groups, np.split(mine, np.cumsum(counts)[:-1]), strict=True):
        falling = group[::-1]
        workers[falling] = own[balanced(falling, lengths, own.size)]
    return workers
