"""Synchronous runs with rehearsals: what they cost at worst, what they save at best, and that no token is lost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.clusters import cluster, trace
from tests.schedule.waits import WaitLaw, with_waits
from treering.errors import ConfigError, InputError
from treering.schedule.cluster import linear_latency
from treering.schedule.placement import Placement
from treering.schedule.rehearsed import (
    CHUNK,
    RehearsalPlacement,
    choose_rehearsals,
    draw_changes,
    expected_kept,
    rehearsed_bound_s,
    simulate_rehearsed,
)
from treering.schedule.simulator import bound_s
from treering.schedule.traces import synthetic_trace

LONGEST = Placement(name="longest first", stealing="queued")
STEPS = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=9), min_size=4, max_size=4)


def workers(num_workers=2, num_slots=2, *, row_s=0.0, prefill_s=0.0, training_s=0.0, load_s=0.0):
    latency = linear_latency(step_s=1.0, row_s=row_s, prefill_s=prefill_s, load_s=load_s, training_s=training_s)
    return cluster(num_workers, num_slots, staleness=0, latency=latency)


def run(steps, own, num_rows, change=0.0, *, seed=0, placement=LONGEST):
    chosen = RehearsalPlacement(placement=placement, num_rows=num_rows)
    return simulate_rehearsed(steps, own, chosen, change, draw_changes(steps, change, seed=seed))


def synthetic(seed=0):
    return synthetic_trace("lognormal:4,0.8,500", num_steps=5, num_rollouts=64, seed=seed)


def test_a_small_run_takes_what_a_calculation_by_hand_says():
    # One worker of two slots: 4 and 2 tokens leave a row idle for 2 s and both for the update of 3 s.
    steps, own = trace([4, 2], [9, 9]), workers(1, training_s=3.0)
    found = run(steps, own, 2)
    assert found.num_rehearsed.tolist() == [0, 8]
    # 5 and 3 of 9 tokens were sampled early; 4 and 6 are left.
    assert found.sampled_s.tolist() == [4, 7 + 6]
    assert found.makespan_s == 16
    assert run(steps, own, None).makespan_s == 7 + 9 + 3
    # An idle worker alone rehearses in the update: 3 of each.
    assert run(steps, own, 0).num_rehearsed.tolist() == [0, 6]


def test_a_rehearsing_row_makes_the_others_slower_by_one_row():
    # 10 tokens alone at 2 s, or next to a rehearsal at 3 s.
    steps = trace([10], [10])
    assert run(steps, workers(1, row_s=1.0), None).sampled_s.tolist() == [20, 40]
    assert run(steps, workers(1, row_s=1.0), 0).sampled_s.tolist() == [20, 40]
    assert run(steps, workers(1, row_s=1.0), 1).sampled_s.tolist() == [30, 30]


def test_verification_takes_a_prefill_up_to_the_chunk_of_the_first_change():
    steps, own = trace([2000], [2000], max_tokens=2000), workers(1, prefill_s=0.01)
    changes = [np.array([2000]), np.array([700])]
    chosen = RehearsalPlacement(placement=LONGEST, num_rows=1)
    found = simulate_rehearsed(steps, own, chosen, 0.0, changes)
    assert (found.num_rehearsed[1], found.num_verified[1], found.num_kept[1]) == (2000, 2 * CHUNK, 700)
    assert found.makespan_s == pytest.approx(2000 + 0.01 * 2 * CHUNK + 1300)


def test_no_rollout_of_a_step_waits_for_a_row_that_rehearses():
    # Rows and prefill cost nothing here, so steps with rehearsals must end as early as without.
    steps, own = synthetic(), workers(3, 4)
    assert run(steps, own, 4, 1.0).sampled_s == pytest.approx(run(steps, own, None).sampled_s)


@settings(max_examples=15, deadline=None)
@given(steps=STEPS, row_s=st.floats(0, 2), training_s=st.floats(0.1, 20), prefill_s=st.floats(0, 0.5))
def test_without_changes_a_run_is_never_slower_than_without_rehearsals(steps, row_s, training_s, prefill_s):
    known, own = trace(*steps), workers(row_s=row_s, training_s=training_s, prefill_s=prefill_s)
    choices = [choose_rehearsals(known, own, change=change) for change in (0.0, 1.0)]
    found, plain = (run(known, own, chosen.num_rows, placement=chosen.placement) for chosen in choices)
    assert choices[1].num_rows is None
    assert found.makespan_s <= plain.makespan_s + 1e-6
    assert found.makespan_s >= found.bound_s - 1e-6


@settings(max_examples=15, deadline=None)
@given(steps=STEPS, num_rows=st.integers(0, 2), prefill_s=st.floats(0, 0.5))
def test_if_all_change_a_run_takes_the_synchronous_time_and_that_of_verifying_what_was_dropped(
    steps, num_rows, prefill_s
):
    known, own = trace(*steps), workers(training_s=5.0, prefill_s=prefill_s)
    found, plain = run(known, own, num_rows, 1.0), run(known, own, None)
    assert found.num_kept.sum() == 0
    extra = found.makespan_s - plain.makespan_s
    # Workers verify at the same time, and at best equal shares. A worker that verifies starts later: others steal.
    assert extra >= -1e-6 or found.num_stolen > 0
    assert extra <= prefill_s * found.num_verified.sum() + 1e-6
    if prefill_s == 0:
        assert extra == pytest.approx(0)


def test_if_all_change_nothing_is_rehearsed():
    own = workers(4, 8, row_s=0.1, prefill_s=0.01, training_s=20.0)
    assert choose_rehearsals(synthetic(), own, change=1.0).num_rows is None


@settings(max_examples=15, deadline=None)
@given(steps=STEPS, row_s=st.floats(0, 2), change=st.floats(0, 1), num_rows=st.integers(0, 3), seed=st.integers(0, 9))
def test_every_token_of_a_step_is_kept_or_decoded(steps, row_s, change, num_rows, seed):
    known, own = trace(*steps), workers(row_s=row_s, training_s=5.0, load_s=1.0)
    found = run(known, own, num_rows, change, seed=seed)
    totals = [sum(lengths) for lengths in steps]
    assert found.num_kept + found.num_decoded == pytest.approx(totals)
    assert (found.num_kept <= found.num_verified).all()
    assert (found.num_verified <= found.num_rehearsed).all()
    assert (found.num_rehearsed <= totals).all()
    assert found.num_rollouts.reshape(4, 2).sum(1).tolist() == [len(lengths) for lengths in steps]
    assert found.makespan_s >= found.bound_s - 1e-6


def test_a_seed_gives_the_same_run_and_another_one_another():
    own = workers(4, 8, row_s=0.1, prefill_s=0.01, training_s=20.0)
    first, again, other = (run(synthetic(), own, 2, 0.02, seed=seed) for seed in (0, 0, 1))
    assert (first.trained_s == again.trained_s).all()
    assert (first.num_kept == again.num_kept).all()
    assert first.num_kept.tolist() != other.num_kept.tolist()
    found = [choose_rehearsals(synthetic(), own, change=0.01) for _ in range(2)]
    assert found[0] == found[1]


def test_fewer_changes_keep_more_and_end_earlier():
    own = workers(4, 16, row_s=0.01, prefill_s=0.001, training_s=20.0)
    found = [run(synthetic(), own, 4, change) for change in (0.0, 0.001, 0.01, 0.1)]
    shares = [each.num_kept.sum() / each.num_rehearsed.sum() for each in found]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0
    assert found[0].makespan_s < found[2].makespan_s < run(synthetic(), own, None).makespan_s


def test_the_bound_is_the_synchronous_one_if_all_change_and_lower_if_none_does():
    steps, own = trace([100], [100], [100]), workers(1, training_s=10.0, load_s=1.0)
    everything, nothing = (draw_changes(steps, change, seed=0) for change in (0.0, 1.0))
    assert rehearsed_bound_s(steps, own, nothing) == bound_s(steps, own) == 100 + 10 + 2 * 111
    # All of the second step fits into the first one, and 11 s of the third into the second one.
    assert rehearsed_bound_s(steps, own, everything) == 110 + 11 + (1 + 89 + 10)


def test_changes_come_with_their_chance():
    steps = trace([1000] * 5000)
    (kept,) = draw_changes(steps, 0.001, seed=0)
    assert kept.mean() == pytest.approx(expected_kept(0.001, np.array([1000]))[0], rel=0.02)
    assert kept.mean() / 1000 == pytest.approx(0.632, abs=0.02)
    assert draw_changes(steps, 1.0, seed=0)[0].max() == 0
    with pytest.raises(ConfigError, match="must be between 0 and 1, got"):
        draw_changes(steps, 1.5, seed=0)


def test_rollouts_that_wait_are_refused():
    own = workers(4, 8, row_s=0.1)
    waiting = with_waits(synthetic(), WaitLaw(share=0.5), own, noise=0.0, seed=0)
    with pytest.raises(InputError, match="wait for an environment are not rehearsed"):
        run(waiting, own, 0)
    with pytest.raises(InputError, match="wait for an environment are not rehearsed"):
        choose_rehearsals(waiting, own, change=0.0)
