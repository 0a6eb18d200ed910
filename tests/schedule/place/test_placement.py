from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.clusters import cluster
from treering.schedule.placement import Placement, assign_workers, balanced, equal_counts, longest_first

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=12).map(lambda values: np.array(values, np.float64))


def test_equal_lengths_probe_every_prompt_before_its_group_continues():
    assert longest_first(np.full(4, 7.0), np.array([0, 0, 1, 1])).tolist() == [0, 2, 1, 3]
    # Prompts need not be adjacent or count from 0.
    assert longest_first(np.full(5, 7.0), np.array([9, 4, 9, 9, 4])).tolist() == [0, 1, 2, 4, 3]
    assert longest_first(np.array([7.0, 7.0, 8.0, 7.0]), np.array([0, 0, 0, 1])).tolist() == [2, 0, 3, 1]


@given(LENGTHS, st.integers(1, 6))
def test_equal_counts_differ_by_one_rollout_at_most(lengths, num_groups):
    groups = equal_counts(longest_first(lengths), num_groups)
    sizes = np.bincount(groups, minlength=num_groups)
    assert sizes.max() - sizes.min() <= 1
    assert sizes.size == num_groups
    # Groups are ranges: no rollout is longer than any of the group before.
    assert (np.diff(groups[longest_first(lengths)]) >= 0).all()


@given(LENGTHS, st.integers(1, 6))
def test_balanced_is_the_greedy_rule(lengths, num_workers):
    order, loads, expected = longest_first(lengths), [0.0] * num_workers, []
    for rollout in order:
        expected.append(loads.index(min(loads)))
        loads[expected[-1]] += lengths[rollout]
    assert balanced(order, lengths, num_workers).tolist() == expected


PLACINGS = ["balanced", "equal_counts"]


def placed(placement, lengths, *, step=1, num_workers=4, num_slots=8, prompts=None):
    lengths = np.array(lengths, np.float64)
    prompts = np.arange(lengths.size) if prompts is None else np.array(prompts)
    return assign_workers(placement, lengths, prompts, step=step, cluster=cluster(num_workers, num_slots, row_s=0.1))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_rollout_has_a_worker_of_the_steps_turn(data):
    num_workers = data.draw(st.integers(1, 9))
    num_turns = data.draw(st.integers(1, num_workers))
    long_share = data.draw(st.sampled_from([0.0, 0.01, 0.3, 0.9]))
    placement = Placement(
        name="any",
        num_turns=num_turns,
        placing=data.draw(st.sampled_from(PLACINGS)),
        long_share=long_share,
        num_long_workers=data.draw(st.integers(1, 9)) if long_share else 0,
    )
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=30))
    step = data.draw(st.integers(1, 7))
    assignment = placed(placement, lengths, step=step, num_workers=num_workers)
    assert assignment.workers.shape == (len(lengths),)
    assert set(assignment.workers.tolist()) <= {w for w in range(num_workers) if w % num_turns == step % num_turns}
    ordered = np.array(lengths)[assignment.order]
    assert (np.diff(ordered) <= 0).all()
    assert assignment.predicted_lengths.tolist() == lengths


def test_a_worker_with_short_rollouts_has_long_ones_next():
    lengths = np.random.default_rng(0).lognormal(4, 0.8, 200)
    odd, even = (
        placed(Placement(name="any", placing="equal_counts"), lengths, step=step, num_workers=10) for step in (3, 4)
    )
    means = [np.array([lengths[share.workers == w].mean() for w in range(10)]) for share in (odd, even)]
    assert (np.diff(means[0]) > 0).all()
    # Step 4 deals the same shares from the other end.
    assert even.workers.tolist() == (9 - odd.workers).tolist()
    assert means[0].tolist() == means[1][::-1].tolist()


def test_long_workers_hold_the_longest_rollouts_and_nothing_else():
    lengths = np.random.default_rng(1).permutation(np.arange(1, 101))
    placement = Placement(name="long workers", num_turns=2, long_share=0.2, num_long_workers=3)
    workers = placed(placement, lengths, step=1, num_workers=10).workers
    in_long = np.isin(workers, [1, 3, 5])
    assert sorted(lengths[in_long]) == list(range(81, 101))
    assert set(workers[~in_long]) == {7, 9}
    sums = np.bincount(workers, weights=lengths, minlength=10)
    assert np.ptp(sums[[1, 3, 5]]) < 100
    assert np.ptp(sums[[7, 9]]) < 80


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_long_workers_leave_the_other_rollouts_a_worker(num_workers):
    lengths = np.arange(1, 11)
    placement = Placement(name="long workers", long_share=0.3, num_long_workers=5)
    workers = placed(placement, lengths, num_workers=num_workers).workers
    assert set(workers) == set(range(num_workers))
    if num_workers > 1:
        assert sorted(lengths[workers < num_workers - 1]) == [8, 9, 10]


@pytest.mark.parametrize(("rebalancing", "expected"), [("none", "off"), ("queued", "off"), ("running", "consolidate")])
def test_a_placement_moves_no_running_rollout_where_workers_cannot(rebalancing, expected):
    where = replace(cluster(2, 4), rebalancing=rebalancing)
    placement = Placement(name="gathers", stealing="queued", moving="consolidate")
    assert assign_workers(placement, np.array([4.0, 2.0]), np.arange(2), step=1, cluster=where).moving == expected


def test_rollouts_that_wait_are_placed_by_their_tokens_and_start_by_their_spans():
    lengths, prompts = np.array([40.0, 30.0, 20.0, 10.0]), np.arange(4)
    workers = cluster(2, 1, step_s=1.0)
    placement = Placement(name="any", moving="drain")
    plain = assign_workers(placement, lengths, prompts, step=1, cluster=workers)
    waiting = assign_workers(
        placement, lengths, prompts, step=1, cluster=workers, wait_s=np.array([0.0, 0.0, 15.0, 100.0])
    )
    assert waiting.workers.tolist() == plain.workers.tolist()
    assert waiting.order.tolist() == [3, 0, 2, 1]
    assert waiting.moving == "off"
    nothing = assign_workers(placement, lengths, prompts, step=1, cluster=workers, wait_s=np.zeros(4))
    assert (nothing.order.tolist(), nothing.moving) == (plain.order.tolist(), plain.moving)
