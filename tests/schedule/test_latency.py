import numpy as np
import pytest

from treering.errors import InputError
from treering.schedule.cluster import Latency, is_among, linear_latency, shape_of


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
