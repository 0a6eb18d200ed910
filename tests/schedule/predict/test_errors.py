import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treering.schedule.predict.calibrated_lengths import PredictionErrors


def drawn(found_errors, predicted, seed=0):
    return found_errors.draw(np.asarray(predicted, float), np.random.default_rng(seed))


def test_normal_errors_are_drawn_normally_and_anew():
    random = np.random.default_rng(1)
    errors = 0.4 * random.standard_normal(8000) - 0.1
    found = drawn(PredictionErrors(random.standard_normal(8000), errors), random.standard_normal(50_000))
    # Of 250 errors a bin the median is off by 1.25 x 0.4 / sqrt(250), and over 32 bins by a sixth of that.
    assert found.mean() == pytest.approx(-0.1, abs=0.02)
    assert found.std() == pytest.approx(0.4, rel=0.05)
    # 3 of 1,000 normal ones lie beyond 3 spreads and are kept as they were; all others are new.
    assert np.isin(found, errors).mean() < 0.01


def test_errors_far_from_all_others_come_as_often_as_they_came_and_as_large():
    random = np.random.default_rng(2)
    errors = np.where(random.random(6400) < 0.2, -2.0, 0.05 * random.standard_normal(6400))
    found = drawn(PredictionErrors(random.standard_normal(6400), errors), random.standard_normal(20_000))
    # A share of 0.2 among 6,400, and then among 20,000: standard errors of 0.005 and 0.003.
    assert (found == -2.0).mean() == pytest.approx(0.2, abs=0.02)
    rest = found[found != -2.0]
    assert np.abs(rest).max() < 0.5
    # A fifth on one side moves the median by a quarter of a spread, and widens what half of all lie within.
    assert rest.std() == pytest.approx(0.05, rel=0.5)


def test_short_and_long_predictions_miss_in_their_own_ways():
    predicted = np.arange(3200.0)
    errors = np.where(predicted < 1600, 0.5, -0.5)
    found_errors = PredictionErrors(predicted, errors)
    assert (drawn(found_errors, np.linspace(0, 1599, 500)) == 0.5).all()
    assert (drawn(found_errors, np.linspace(1600, 3199, 500)) == -0.5).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-3, 3)), min_size=1, max_size=200), st.integers(0, 99))
def test_any_errors_give_finite_ones(pairs, seed):
    predicted, errors = np.array(pairs).T
    found_errors = PredictionErrors(predicted, errors)
    asked = np.concatenate([predicted, [-1e9, 1e9, 0.0]])
    found = drawn(found_errors, asked, seed)
    assert found.shape == asked.shape
    assert np.isfinite(found).all()
    assert (found == drawn(found_errors, asked, seed)).all()


def test_what_reached_the_limit_does_so_again_as_often():
    random = np.random.default_rng(4)
    errors = np.where(random.random(6400) < 0.6, np.inf, 0.1 * random.standard_normal(6400))
    found = drawn(PredictionErrors(random.standard_normal(6400), errors), random.standard_normal(20_000))
    assert np.isinf(found).mean() == pytest.approx(0.6, abs=0.02)
    assert found[np.isfinite(found)].std() == pytest.approx(0.1, rel=0.1)
    # Those below it speak for a normal law of their own.
    assert np.isin(found[np.isfinite(found)], errors).mean() < 0.02
    assert np.isinf(drawn(PredictionErrors(np.zeros(3), np.full(3, np.inf)), np.zeros(5))).all()
