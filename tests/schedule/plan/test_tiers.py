from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.clusters import cluster
from treering.schedule.plan.tiers import share_out


def seconds(group, num_workers, where):
    """What a group takes on so many workers that share it evenly, each as full as it can be."""
    token_s, slots = where.latency.token_s(where.num_slots), where.num_slots
    tokens = group.sum() / num_workers
    steps = max(group.max(), tokens / slots)
    return steps * np.interp(tokens / steps, np.arange(slots + 1), token_s)


def two_steps(groups, counts, where):
    """The longest that a worker runs in an odd and an even step, where the even one deals groups out from the end."""
    # More workers that would take longer need not all be used.
    each = [
        min(seconds(group, k, where) for k in range(1, count + 1)) for group, count in zip(groups, counts, strict=True)
    ]
    odd = np.repeat(each, counts)
    return (odd + odd[::-1]).max()


def groups_of(lengths, num_groups):
    return np.array_split(np.sort(np.asarray(lengths, np.float64)), num_groups)


def case_of(num_groups, num_more, seed, row_s):
    rng = np.random.default_rng(seed)
    groups = groups_of(rng.lognormal(5, rng.uniform(0.1, 1.5), rng.integers(num_groups, 100)), num_groups)
    return groups, cluster(num_groups + num_more, int(rng.integers(1, 33)), step_s=20.0, row_s=row_s)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 20), st.integers(0, 10**6), st.sampled_from([0.0, 0.05, 1.0, 20.0]))
def test_all_workers_are_given_out_and_each_group_has_one(num_groups, num_more, seed, row_s):
    groups, where = case_of(num_groups, num_more, seed, row_s)
    counts = share_out(groups, where)
    assert counts.shape == (num_groups,)
    assert counts.min() >= 1
    assert counts.sum() == where.num_workers
    alike = np.diff(np.arange(num_groups + 1) * where.num_workers // num_groups)
    assert two_steps(groups, counts, where) <= two_steps(groups, alike, where) * (1 + 1e-9)


def by_slopes(times, num_workers):
    """The printed plans, plainly: every start, the least slope by halving, and steeper ones; counts of each group."""
    num_groups, num_counts = times.shape
    ranks = np.arange(num_groups)[:, None]
    for start in np.linspace(times[0, -1], times[0, 0], 8):
        low, high = 0.0, times.max()
        for _ in range(24):
            slope = (low + high) / 2
            counts = 1 + (times > start + slope * ranks).sum(axis=1)
            low, high = (low, slope) if (counts <= num_counts).all() and counts.sum() <= num_workers else (slope, high)
        for steepness in (1.0, 1.1, 1.25, 1.5, 2.0, 3.0):
            counts = 1 + (times > start + steepness * high * ranks).sum(axis=1)
            yield np.minimum(counts, 1 if high == times.max() else num_counts)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 24), st.integers(0, 10**6), st.sampled_from([0.0, 0.05, 1.0, 20.0]))
def test_plans_are_at_least_as_good_as_the_printed_ones(num_groups, num_more, seed, row_s):
    groups, where = case_of(num_groups, num_more, seed, row_s)
    each = [[seconds(group, count, where) for count in range(1, num_more + 2)] for group in groups]
    times = np.minimum.accumulate(np.array(each), axis=1)
    printed = min(two_steps(groups, counts, where) for counts in by_slopes(times, where.num_workers))
    assert two_steps(groups, share_out(groups, where), where) <= printed * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_small_cases_are_near_the_best_of_all_ways_to_share_out(seed):
    rng = np.random.default_rng(seed)
    groups = groups_of(rng.lognormal(5, 0.8, 40), 3)
    where = cluster(9, 8, step_s=20.0, row_s=2.0)
    ways = [way for way in product(range(1, 8), repeat=3) if sum(way) == 9]
    best = min(two_steps(groups, way, where) for way in ways)
    assert two_steps(groups, share_out(groups, where), where) <= 1.25 * best
