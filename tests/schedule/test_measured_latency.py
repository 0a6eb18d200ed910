"""Fitted times recover a known law, do not depend on order, and give no latency where a slope is undetermined."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.errors import InputError
from treering.schedule.cluster import Latency, is_among, linear_latency, shape_of
from treering.schedule.measured_latency import MeasuredTimes, merged

SECONDS = st.floats(0.0, 0.1)
COUNTS = st.integers(0, 40)
PASSES = st.lists(st.tuples(SECONDS, COUNTS, COUNTS, COUNTS), max_size=80)
SIZES = (1, 2, 3, 5, 8, 16)


def told(passes, loads=(), trainings=()):
    times = MeasuredTimes()
    for seconds, rows, prefilled, sampled in passes:
        times.note_pass(seconds, num_rows=rows, num_prefilled=prefilled, num_sampled=sampled)
    for seconds in loads:
        times.note_load(seconds)
    for seconds in trainings:
        times.note_training(seconds)
    return times


def lawful(step_s, row_s, prefill_s, *, gain=1, num=20):
    """Return passes of some sizes that obey the law, every third with a prefill."""
    return [
        (step_s + row_s * rows + prefill_s * prefilled, rows, prefilled, gain * rows)
        for rows in SIZES
        for prefilled in (0, 0, rows * 7)
        for _ in range(num)
    ]


@given(st.floats(1e-4, 1.0), st.floats(0.0, 0.1), st.floats(0.0, 0.01))
def test_a_known_law_is_found_again(step_s, row_s, prefill_s):
    latency = told(lawful(step_s, row_s, prefill_s)).latency()
    expected = [step_s + row_s * rows for rows in range(1, 33)]
    # Times are kept in whole nanoseconds.
    assert latency.token_s(32)[1:].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert latency.prefill_s == pytest.approx(prefill_s, rel=1e-4, abs=1e-7)
    assert latency.tokens_per_step is None


def test_varying_long_prefills_do_not_change_the_fit_of_decoding():
    decoding = [(0.001 + 0.0001 * rows, rows, 0, rows) for rows in SIZES for _ in range(20)]
    prefilling = [
        (factor * tokens / 4000, rows, tokens, rows)
        for rows, factor in ((1, 1.5), (2, 0.8), (16, 1.0))
        for tokens in (1000, 4000)
        for _ in range(20)
    ]
    latency = told([*decoding, *prefilling]).latency()
    assert latency.token_s(16)[[1, 16]].tolist() == pytest.approx([0.0011, 0.0026], rel=0.05)


@pytest.mark.parametrize("at", range(0, 360, 40))
def test_a_delayed_pass_changes_nothing(at):
    passes = lawful(0.001, 0.0001, 0.0)
    alone = told(passes).latency()
    disturbed = told([*passes, (5.0, *passes[at][1:])]).latency()
    np.testing.assert_array_equal(disturbed.token_s(16), alone.token_s(16))


@given(PASSES, st.lists(SECONDS), st.lists(SECONDS), st.randoms(use_true_random=False))
def test_the_order_of_times_and_sums_does_not_matter(passes, loads, trainings, random):
    whole = told(passes, loads, trainings)
    shuffled = random.sample(passes, len(passes))
    middle = len(passes) // 2
    parts = [told(shuffled[:middle], loads[1:], trainings), told(shuffled[middle:], loads[:1])]
    for some in (parts, parts[::-1]):
        assert merged(some) == whole
        assert merged(some).state() == whole.state()
    left, right = whole.latency(), merged(parts).latency()
    assert (left is None) == (right is None)
    if left is not None:
        np.testing.assert_array_equal(left.token_s(40), right.token_s(40))


@given(PASSES)
def test_every_latency_is_one_that_plans_can_be_made_with(passes):
    # `Latency` itself refuses times that fall or are not positive.
    latency = told(passes * 16).latency()
    if latency is not None:
        assert np.isfinite(latency.token_s(64)).all()
        assert (latency.token_s(64)[1:] > 0).all()


@pytest.mark.parametrize(
    "passes",
    [
        [],
        [(0.01, 8, 0, 8)] * 1000,
        # 5 to 8 rows are one size, and 9 are less than twice as many.
        [(0.01, 8, 0, 8)] * 100 + [(0.02, 9, 0, 9)] * 100,
        [(0.01, 8, 0, 8)] * 100 + [(0.005, 1, 0, 1)] * 15,
        # A pass without rows samples nothing.
        [(0.01, 8, 0, 8)] * 100 + [(0.005, 0, 50, 0)] * 100,
    ],
)
def test_passes_that_are_all_alike_give_no_latency(passes):
    assert told(passes).latency() is None


def test_speculation_gives_tokens_by_rows():
    passes = [(0.01, 1, 0, 3)] * 20 + [(0.01, 2, 0, 4)] * 20 + [(0.02, 8, 0, 8)] * 20
    latency = told(passes).latency()
    assert latency.num_rows.tolist() == [1, 2, 8]
    assert latency.tokens_per_step.tolist() == [3.0, 2.0, 1.0]


def test_loads_and_updates_count_with_their_median():
    times = told([(0.003, 1, 0, 1)] * 20 + [(0.010, 8, 0, 8)] * 20, [0.2, 0.1, 9.0], [5.0, 1.0, 2.0, 1.0])
    assert (times.latency().load_s, times.latency().training_s) == (0.2, 1.5)
    unseen = told(lawful(0.1, 0.1, 0.0)).latency()
    assert (unseen.load_s, unseen.training_s) == (0.0, 0.0)


def test_passes_of_hardly_a_row_each_give_no_latency():
    times = MeasuredTimes()
    # Means of 0.6 and 4 / 3 rows both round to one row.
    for num_rows, num_passes in [(1, 2)] * 20 + [(1, 1)] * 10 + [(4, 3)] * 20:
        times.note_pass(0.01 * num_passes, num_rows=num_rows, num_prefilled=0, num_sampled=1, num_passes=num_passes)
    assert times.latency() is None


def test_passes_timed_together_count_separately():
    single, together = told([(0.003, 1, 0, 1)] * 20 + [(0.010, 8, 0, 8)] * 20), MeasuredTimes()
    together.note_pass(0.06, num_rows=20, num_prefilled=0, num_sampled=20, num_passes=20)
    for _ in range(4):
        together.note_pass(0.05, num_rows=40, num_prefilled=0, num_sampled=40, num_passes=5)
    assert together == single


@given(PASSES, st.lists(SECONDS), st.lists(SECONDS))
def test_times_survive_pipes_and_checkpoints(passes, loads, trainings):
    times = told(passes, loads, trainings)
    assert pickle.loads(pickle.dumps(times)) == times
    assert MeasuredTimes.from_state(times.state()) == times
    numbers = [number for cell in times.state()["cells"] for number in cell]
    assert all(type(number) is int for number in numbers)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_times_that_are_none_are_refused(seconds):
    for note in (MeasuredTimes().note_load, MeasuredTimes().note_training, lambda s: told([(s, 1, 0, 1)])):
        with pytest.raises(InputError, match="at least 0"):
            note(seconds)


def test_steps_are_flat_then_linear_between_measured_rows_and_beyond():
    latency = Latency(num_rows=[2, 4, 8], decode_s=[10.0, 11.0, 15.0])
    assert latency.token_s(10).tolist() == [0, 10, 10, 10.5, 11, 12, 13, 14, 15, 16, 17]


def test_speculation_divides_a_step_by_the_tokens_it_gains():
    latency = Latency(num_rows=[0, 2, 4], decode_s=[8.0, 8.0, 12.0], tokens_per_step=[4, 4, 1])
    # Three rows take 10 s and gain 2.5 tokens each. Beyond the measured sizes the gain stays and the time grows.
    assert latency.token_s(5).tolist() == [0, 2, 2, 4, 12, 14]


def test_rows_that_do_not_rise_and_times_that_are_none_are_refused():
    for rows, seconds in (([1], [1.0]), ([1, 2], [1.0]), ([2, 1], [1.0, 2.0]), ([-1, 2], [1.0, 2.0])):
        with pytest.raises(InputError, match="at least two ascending num_rows"):
            Latency(num_rows=rows, decode_s=seconds)
    for seconds in ([0.0, 1.0], [2.0, 1.0], [1.0, np.nan]):
        with pytest.raises(InputError, match="a decode step must take time"):
            Latency(num_rows=[1, 2], decode_s=seconds)
    for name in ("prefill_s", "load_s", "training_s"):
        with pytest.raises(InputError, match=f"{name} must be seconds"):
            linear_latency(step_s=1.0, row_s=0.0, **{name: -1.0})


def alike(one, other, max_rows):
    return is_among(shape_of(one, max_rows), [shape_of(other, max_rows)])


def test_latencies_are_alike_up_to_their_unit_and_a_quarter():
    one = linear_latency(step_s=20, row_s=0.05, training_s=1000)
    assert alike(one, one, 64)
    assert alike(one, linear_latency(step_s=0.2, row_s=0.0005, training_s=10), 64)
    assert alike(one, linear_latency(step_s=20, row_s=0.05, training_s=1200), 64)
    assert not alike(one, linear_latency(step_s=20, row_s=0.05, training_s=1300), 64)
    assert not alike(one, linear_latency(step_s=20, row_s=0.05), 64)
    # 64 rows take 23.2 instead of 20.05 s, or 84 instead of 21 s: factors of 1.16 and 4.
    assert not alike(one, linear_latency(step_s=20, row_s=1.0, training_s=1000), 64)
    assert alike(one, linear_latency(step_s=20, row_s=1.0, training_s=1000), 1)


def test_latencies_between_two_with_one_plan_get_that_plan():
    assert not is_among((1.2, 22.0), [])
    known = [(1.0, 20.0), (2.0, 10.0)]
    assert is_among((1.5, 15.0), known)
    assert is_among((0.8, 8.0), known)
    assert is_among((2.5, 25.0), known)
    for other in ((0.79, 15.0), (2.51, 15.0), (1.5, 7.9), (1.5, 25.1)):
        assert not is_among(other, known)


def test_gains_of_speculation_count_if_they_depend_on_rows():
    plain = Latency(num_rows=[1, 8], decode_s=[10.0, 12.0])
    even = Latency(num_rows=[1, 8], decode_s=[10.0, 12.0], tokens_per_step=[3, 3])
    uneven = Latency(num_rows=[1, 8], decode_s=[10.0, 12.0], tokens_per_step=[3, 2])
    assert alike(plain, even, 8)
    assert not alike(plain, uneven, 8)
