from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from treering.schedule.plan.plans import balanced, equal_counts, equal_sums, longest_first

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=12).map(lambda values: np.array(values, np.float64))


def test_of_equal_lengths_every_prompt_is_probed_before_its_group_goes_on():
    assert longest_first(np.full(4, 7.0), np.array([0, 0, 1, 1])).tolist() == [0, 2, 1, 3]
    # Prompts need not stand together, nor count from 0.
    assert longest_first(np.full(5, 7.0), np.array([9, 4, 9, 9, 4])).tolist() == [0, 1, 2, 4, 3]
    assert longest_first(np.array([7.0, 7.0, 8.0, 7.0]), np.array([0, 0, 0, 1])).tolist() == [2, 0, 3, 1]


@given(LENGTHS, st.integers(1, 6))
def test_equal_counts_differ_by_one_rollout_at_most(lengths, num_groups):
    groups = equal_counts(longest_first(lengths), num_groups)
    sizes = np.bincount(groups, minlength=num_groups)
    assert sizes.max() - sizes.min() <= 1
    assert sizes.size == num_groups
    # Ranges: no rollout is longer than one of a group before.
    assert (np.diff(groups[longest_first(lengths)]) >= 0).all()


@given(LENGTHS, st.integers(1, 6))
def test_equal_sums_are_off_by_the_longest_rollout_at_most(lengths, num_groups):
    order = longest_first(lengths)[::-1]
    groups = equal_sums(order, lengths, num_groups)
    assert (np.diff(groups[order]) >= 0).all()
    assert 0 <= groups.min() <= groups.max() < num_groups
    sums = np.bincount(groups, weights=lengths, minlength=num_groups)
    assert abs(sums - lengths.sum() / num_groups).max() <= lengths.max() + 1e-9


@given(LENGTHS, st.integers(1, 6))
def test_balanced_is_the_greedy_rule(lengths, num_workers):
    order, loads, expected = longest_first(lengths), [0.0] * num_workers, []
    for rollout in order:
        expected.append(loads.index(min(loads)))
        loads[expected[-1]] += lengths[rollout]
    assert balanced(order, lengths, num_workers).tolist() == expected


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 3))
def test_the_longest_first_are_balanced_within_graham_s_bound(values, num_workers):
    lengths = np.array(values, np.float64)
    order = longest_first(lengths)
    found = np.bincount(balanced(order, lengths, num_workers), weights=lengths[order]).max()
    best = min(np.bincount(split, weights=lengths).max() for split in product(range(num_workers), repeat=lengths.size))
    assert found <= (4 / 3 - 1 / (3 * num_workers)) * best + 1e-9
