"""RhymeRL's Tier 2: the number of workers for each group of ranks.

N groups, W workers
"""

from collections.abc import Sequence

import numpy as np

from treering.arrays import Float64Array, Int64Array
from treering.compiling.once import compiled_once
from treering.schedule.cluster import Cluster

_NUM_STARTS = 8
_NUM_HALVINGS = 24
_STEEPNESS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)


def share_out(groups: Sequence[Float64Array], cluster: Cluster) -> Int64Array:
    """int64 [N]: workers of each group, at least one each and W in all, for groups with rising lengths, N <= W.

    As in the paper (section 6.4), group i ends by t0 + i d, with the least slope d that is feasible. The differences:
    t0 is searched for; the paper takes the shortest group at its fastest, which leaves the others too few workers if
    training is short. Steeper slopes are tried too: the least one gives most workers to the longest group, whose
    longest rollout gains nothing from them. The result is never worse than equal counts. Remaining workers are added
    where they help. The objective is the longest time that any worker runs in an odd and an even step together.

    Example: groups of [100] * 8 and [400] * 8 on 5 workers with 8 slots, a step of 20 + 1 s a row, get 3 and 2: with 3
    of the longer ones, one worker would have them in both steps.
    """
    times = _times(groups, cluster)
    slowest, fastest = times[0, 0], times[0, -1]
    starts = np.linspace(fastest, slowest, _NUM_STARTS)
    plans = [counts for start in starts for counts in _by_slopes(times, start)]
    best = _add_remaining(times, min(plans, key=lambda counts: _two_steps(times, counts)), cluster.num_workers)
    alike = np.diff(np.arange(len(groups) + 1) * cluster.num_workers // len(groups))
    return min((best, alike), key=lambda counts: _two_steps(times, counts))


def _times(groups: Sequence[Float64Array], cluster: Cluster) -> Float64Array:
    """float64 [N, K]: time of each group on 1 to K = W - N + 1 workers; never rises with workers."""
    token_s = cluster.latency.token_s(cluster.num_slots)
    rows = np.arange(token_s.size)
    counts = np.arange(1, cluster.num_workers - len(groups) + 2)
    found = np.empty((len(groups), counts.size))
    for group, lengths in enumerate(groups):
        tokens = float(lengths.sum()) / counts
        steps = np.maximum(float(lengths.max()), tokens / cluster.num_slots)
        found[group] = steps * np.interp(tokens / steps, rows, token_s)
    return np.minimum.accumulate(found, axis=1)


def _by_slopes(times: Float64Array, start: float) -> list[Int64Array]:
    """The fewest workers for the least feasible slope, and for steeper ones."""
    least = _least_slope(times, start)
    most = 1 if least == times.max() else times.shape[1]
    return [np.minimum(_needed(times, start, steepness * least), most) for steepness in _STEEPNESS]


@compiled_once()
def _least_slope(times: Float64Array, start: float) -> float:
    """The least slope with enough workers, by bisection."""
    num_groups, num_counts = times.shape
    low, high = 0.0, times.max()
    for _ in range(_NUM_HALVINGS):
        slope = (low + high) / 2
        counts = _needed(times, start, slope)
        if counts.max() <= num_counts and counts.sum() < num_counts + num_groups:
            high = slope
        else:
            low = slope
    return float(high)


@compiled_once()
def _needed(times: Float64Array, start: float, slope: float) -> Int64Array:
    """int64 [N]: workers with which each group ends in time; more than there are if none suffice."""
    num_groups, num_counts = times.shape
    found = np.ones(num_groups, np.int64)
    for group in range(num_groups):
        while found[group] <= num_counts and times[group, found[group] - 1] > start + slope * group:
            found[group] += 1
    return found


def _add_remaining(times: Float64Array, counts: Int64Array, num_workers: int) -> Int64Array:
    """Gives each remaining worker to the group that shortens two steps most; to the first if none does."""
    for _ in range(num_workers - int(counts.sum())):
        choices = counts + np.eye(counts.size, dtype=np.int64)
        counts = min(choices, key=lambda choice: _two_steps(times, choice))
    return counts


@compiled_once()
def _two_steps(times: Float64Array, counts: Int64Array) -> float:
    """The longest time of a worker in an odd and an even step together, workers paired by rank."""
    durations, place = np.empty(counts.sum()), 0
    for group in range(counts.size):
        durations[place : place + counts[group]] = times[group, counts[group] - 1]
        place += counts[group]
    return float((durations + durations[::-1]).max())
