"""Placements as data, how they assign the rollouts of a step, and the policies that follow one placement."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from treering.compiling.once import compiled_once
from treering.schedule.cluster import Cluster
from treering.schedule.policy import Assignment, AssignmentRequest, Moving, SchedulePolicy, Stealing
from treering.schedule.simulated_step import sink


def longest_first(lengths: NDArray[np.float64], prompts: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Return the rollouts by falling length, int64 [N].

    Among equal lengths, the first rollouts of all prompts come first, then the second ones, so that without history
    each prompt is probed before more of its group starts. Without prompts equal lengths keep their order.

    Example: lengths [5, 9, 5] give [1, 0, 2]; four equal ones of the prompts [0, 0, 1, 1] give [0, 2, 1, 3].
    """
    if prompts is None:
        return np.argsort(-lengths, kind="stable")
    return np.lexsort((_numbers_in_groups(prompts), -lengths))


def _numbers_in_groups(prompts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many rollouts of its prompt come before each rollout, int64 [N]."""
    order = np.argsort(prompts, kind="stable")
    starts = np.flatnonzero(np.diff(prompts[order], prepend=prompts[order[0]] - 1))
    numbers = np.empty(prompts.size, np.int64)
    numbers[order] = np.arange(prompts.size) - np.repeat(starts, np.diff(starts, append=prompts.size))
    return numbers


def equal_counts(order: NDArray[np.int64], num_groups: int) -> NDArray[np.int64]:
    """Return the group of each rollout, int64 [N]: groups of equal size along an order of all rollouts.

    Example: the order [1, 0, 2, 3] in two groups is [0, 0, 1, 1] by rollout: 1 and 0 first, 2 and 3 then.
    """
    groups = np.empty(order.size, np.int64)
    groups[order] = np.arange(order.size) * num_groups // order.size
    return groups


@compiled_once()
def balanced(order: NDArray[np.int64], lengths: NDArray[np.float64], num_workers: int) -> NDArray[np.int64]:
    """Return for each position in the order the worker with the fewest tokens so far, int64 [N]; the lowest on ties.

    With the longest first this is the rule of Graham (1969), at most 4/3 - 1/(3 G) of the best split.

    Example: lengths [5, 4, 3, 2] in that order on two workers: [0, 1, 1, 0].
    """
    # A heap of the workers by load: the first entry is the next worker.
    loads, workers = np.zeros(num_workers), np.arange(num_workers)
    found = np.empty(order.size, np.int64)
    for index in range(order.size):
        found[index] = workers[0]
        loads[0] += lengths[order[index]]
        sink(loads, workers, 0, num_workers, 0)
    return found


Placing = Literal["balanced", "equal_counts"]
"""How rollouts are split among workers. balanced: the longest first, each to the worker with the fewest predicted
tokens. equal_counts: ranges of ranks with as many rollouts each (RhymeRL's Tier 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One way to assign the rollouts of every step to workers.

    Example: `Placement(name="turns", num_turns=2)` runs odd steps on the odd workers and even steps on the others.
    """

    name: str
    """Name in reports."""
    num_turns: int = 1
    """A step runs on the workers w with w = step modulo num_turns. 1: all workers run every step."""
    placing: Placing = "balanced"
    """How rollouts are split among workers."""
    long_share: float = 0.0
    """Share of the rollouts, the longest ones, that run on long-rollout workers; 0 for none."""
    num_long_workers: int = 0
    """Long-rollout workers of a step, which run only its longest rollouts; 0 if no share does. At least one worker is
    left for the others."""
    stealing: Stealing = "off"
    """Whether idle workers take queued rollouts."""
    moving: Moving = "off"
    """Whether running rollouts move."""


def assign_workers(
    placement: Placement,
    lengths: NDArray[np.float64],
    prompts: NDArray[np.int64],
    *,
    step: int,
    cluster: Cluster,
    wait_s: NDArray[np.float64] | None = None,
) -> Assignment:
    """Assign a step's rollouts to workers.

    Ranges of ranks rise with the worker's index in odd steps and fall in even ones, so that a worker with short
    rollouts now has long ones next (RhymeRL section 6.2).

    Args:
        placement: how to assign the rollouts.
        lengths: float64 [R] > 0: corrected predictions.
        prompts: int64 [R]: prompt index of each rollout.
        step: index of the step, from 1.
        cluster: all W workers.
        wait_s: float64 [R]: predicted seconds of waiting. Rollouts are placed by their tokens, because a waiting
            rollout frees its slot, and start by falling span, which is tokens and waiting together. None if no rollout
            waits.

    Example: lengths [9, 1, 1, 1] with equal counts on two workers: [1, 1, 0, 0] in step 1, [0, 0, 1, 1] in step 2.
    """
    order = longest_first(lengths, prompts)
    available = np.arange(step % placement.num_turns, cluster.num_workers, placement.num_turns)
    if placement.placing == "balanced":
        workers = _with_long_workers(placement, order, lengths, available)
    else:
        ranges = available if step % 2 else available[::-1]
        workers = ranges[equal_counts(order[::-1], ranges.size)]
    spans = None if wait_s is None or not wait_s.any() else spans_s(lengths, wait_s, cluster)
    return Assignment(
        workers=workers.astype(np.int32),
        order=order if spans is None else longest_first(spans, prompts),
        stealing="off" if cluster.rebalancing == "none" else placement.stealing,
        moving=placement.moving if cluster.rebalancing == "running" and spans is None else "off",
        predicted_lengths=lengths,
    )


def spans_s(lengths: NDArray[np.float64], wait_s: NDArray[np.float64], cluster: Cluster) -> NDArray[np.float64]:
    """Return the seconds that rollouts take among an equal share of the others, with waiting: float64 [R]."""
    num_rows = min(cluster.num_slots, -(-lengths.size // cluster.num_workers))
    spans: NDArray[np.float64] = lengths * cluster.latency.token_s(cluster.num_slots)[num_rows] + wait_s
    return spans


def _with_long_workers(
    placement: Placement, order: NDArray[np.int64], lengths: NDArray[np.float64], available: NDArray[np.int64]
) -> NDArray[np.int64]:
    workers = np.empty(lengths.size, np.int64)
    num_long_workers = min(placement.num_long_workers, available.size - 1)
    num_long = round(placement.long_share * lengths.size) if num_long_workers else 0
    parts = ((order[:num_long], available[:num_long_workers]), (order[num_long:], available[num_long_workers:]))
    for part, own in parts:
        workers[part] = own[balanced(part, lengths, own.size)]
    return workers


class Fifo(SchedulePolicy):
    """Random shards of equal size, each in prompt order; predictions are not used.

    Example: 6 rollouts on 2 workers: 3 each, drawn again in every step.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed

    @property
    def name(self) -> str:
        """Name in reports."""
        return "fifo"

    def assign(self, request: AssignmentRequest) -> Assignment:
        """Assign a shard to each worker."""
        num_rollouts = request.forecasts[0].num_rollouts
        random = np.random.default_rng((self._seed, request.step))
        shards = random.permutation(np.arange(num_rollouts) % request.cluster.num_workers)
        return Assignment(workers=shards, order=np.arange(num_rollouts))


class PlacementPolicy(SchedulePolicy):
    """One placement for all steps, with uncorrected forecasts.

    Example: `PlacementPolicy(Placement(name="turns", num_turns=2))` runs odd and even steps on different workers.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    @property
    def name(self) -> str:
        """Name in reports."""
        return self._placement.name

    def assign(self, request: AssignmentRequest) -> Assignment:
        """Assign the rollouts by the placement."""
        forecast = request.forecasts[0]
        return assign_workers(
            self._placement,
            forecast.lengths,
            forecast.prompts,
            step=request.step,
            cluster=request.cluster,
            wait_s=forecast.wait_s,
        )
