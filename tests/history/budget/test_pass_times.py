"""Costs learnt from real passes follow them, never fall, and come again only after as many passes as before."""

import numpy as np

from treering.history.budget.pass_times import PassTimes, non_decreasing


def test_costs_of_an_engine_that_cannot_be_measured_follow_its_passes() -> None:
    times = PassTimes()
    for size, seconds in ((8, 2.0e-3), (16, 2.8e-3)) * 4:
        times.note(size, seconds)
    curve = times.curve()
    assert curve.num_tokens.tolist() == [8, 16, 32]
    np.testing.assert_allclose(curve.seconds, [2.0e-3, 2.8e-3, 4.4e-3], rtol=1e-12)


def test_costs_are_new_after_one_pass_and_then_ever_less_often() -> None:
    times, found = PassTimes(), []
    assert times.new_costs() is None
    for number in range(1, 140):
        times.note(8, 1e-3)
        if times.new_costs() is not None:
            found.append(number)
    assert found == [1, 17, 34, 68, 136]


def test_costs_never_fall() -> None:
    assert non_decreasing(np.array([1.0, 1.2, 1.0, 1.4])).tolist() == [1.0, 1.1, 1.1, 1.4]
    rng = np.random.default_rng(0)
    for _ in range(50):
        seconds = rng.random(8)
        smooth = non_decreasing(seconds)
        assert (np.diff(smooth) >= 0).all()
        np.testing.assert_array_equal(non_decreasing(np.sort(seconds)), np.sort(seconds))
