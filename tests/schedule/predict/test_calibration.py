import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treering.schedule.calibration import (
    PRIOR_SIGMA,
    PRIOR_SPREAD,
    CalibratedLengths,
    PredictionErrors,
)

CAP = 1_000_000


def predictions(num, seed=0, sigma=0.8):
    return np.random.default_rng(seed).lognormal(6, sigma, num)


def test_predictions_are_believed_until_something_was_seen():
    calibrated = CalibratedLengths()
    predicted = np.array([0.2, 30.0, 5000.0])
    assert not calibrated.has_learnt
    assert calibrated.lengths(predicted, 1000).tolist() == pytest.approx([1, 30, 1000])


@settings(max_examples=30, deadline=None)
@given(st.floats(-2, 2), st.floats(-1, 1), st.integers(0, 1000))
def test_the_line_is_that_of_least_squares(slope, offset, seed):
    predicted = predictions(4000, seed)
    noise = 0.3 * np.random.default_rng(seed + 1).standard_normal(predicted.size)
    real = np.rint(np.exp(9 + offset + slope * (np.log(predicted) - 6) + noise)).astype(np.int64).clip(1)
    calibrated = CalibratedLengths()
    calibrated.learn(predicted, real)
    matrix = np.stack([np.log(predicted), np.ones(predicted.size)], axis=1)
    (a, b), *_ = np.linalg.lstsq(matrix, np.log(real), rcond=None)
    asked = np.exp(np.array([5.0, 6.0, 7.0]))
    # The prior counts as 16 of 4,016 rollouts and pulls the slope by 0.4 % of its distance from 1.
    assert np.log(calibrated.lengths(asked, 2**60)) == pytest.approx(np.clip(a * np.log(asked) + b, 0, None), abs=0.03)
    rest = np.log(real) - matrix @ (a, b)
    assert calibrated.sigma(asked) == pytest.approx(rest.std(), rel=0.03)


def test_worthless_predictions_become_one_length():
    real = predictions(3000, 1)
    for predicted in (np.full(3000, 77.0), predictions(3000, 2)):
        calibrated = CalibratedLengths()
        calibrated.learn(predicted, np.rint(real).astype(np.int64))
        low, high = calibrated.lengths(np.quantile(predicted, [0.05, 0.95]), CAP)
        assert low == pytest.approx(np.exp(np.log(real).mean()), rel=0.1)
        assert high == pytest.approx(low, rel=0.1)
        assert calibrated.sigma(predicted) == pytest.approx(0.8, rel=0.05)


def test_a_few_rollouts_weigh_no_more_than_the_prior_does():
    calibrated = CalibratedLengths()
    # Four rollouts show reversed predictions; the prior counts as 16 rollouts with right ones.
    calibrated.learn(np.array([100.0, 400.0] * 2), np.array([400, 100] * 2))
    low, high = calibrated.lengths(np.array([100.0, 400.0]), CAP)
    assert low < high
    # The slope is (16 - 4) / 20 = 0.6, through the mean.
    assert (low, high) == pytest.approx((200 * 2**-0.6, 200 * 2**0.6))


def test_four_steps_are_remembered():
    predicted = np.tile([100.0, 400.0], 500)
    calibrated = CalibratedLengths()
    calibrated.learn(predicted, np.full(predicted.size, 7))
    for _ in range(3):
        calibrated.learn(predicted, predicted.astype(np.int64))
    assert calibrated.lengths(np.array([400.0]), CAP)[0] < 300
    calibrated.learn(predicted, predicted.astype(np.int64))
    assert calibrated.lengths(np.array([100.0, 400.0]), CAP).tolist() == pytest.approx([100, 400])


def test_before_anything_was_seen_predictions_that_are_too_alike_leave_the_rest_unexplained():
    assert CalibratedLengths().sigma(np.full(10, 500.0)) == pytest.approx(PRIOR_SPREAD)
    wide = np.exp(np.array([-1.0, 1.0] * 8))
    assert CalibratedLengths().sigma(wide) == PRIOR_SIGMA
    assert CalibratedLengths(0.5).sigma(wide) == 0.5
    half = np.exp(0.5 * np.array([-1.0, 1.0] * 8))
    assert CalibratedLengths().sigma(half) == pytest.approx(np.sqrt(0.49 - 0.25))


def test_without_any_spread_predictions_are_kept_and_scaled():
    calibrated = CalibratedLengths(0.0)
    calibrated.learn(np.full(5, 100.0), np.full(5, 50))
    assert calibrated.lengths(np.array([100.0, 300.0]), CAP).tolist() == pytest.approx([50, 150])
    assert calibrated.sigma(np.array([100.0])) == pytest.approx(0)


def test_before_anything_was_seen_drawn_lengths_are_normal_in_the_logarithm():
    predicted = np.exp(np.random.default_rng(0).normal(6, 0.8, 20_000))
    drawn = CalibratedLengths(0.3).draw(predicted, 2**60, np.random.default_rng(1))
    errors = np.log(drawn / predicted)
    # Standard errors over 20,000 draws: 0.002 for the mean, 0.0015 for the standard deviation.
    assert errors.mean() == pytest.approx(0, abs=0.01)
    assert errors.std() == pytest.approx(0.3, abs=0.01)
    assert np.mean(errors < -0.6) == pytest.approx(0.0228, abs=0.005)


def test_rollouts_that_ended_early_end_early_again_and_the_others_do_not():
    random = np.random.default_rng(3)
    predicted = predictions(8000, 4)
    is_early = random.random(predicted.size) < 0.2
    calibrated = CalibratedLengths()
    calibrated.learn(predicted, np.rint(np.where(is_early, predicted / 5, predicted)).astype(np.int64).clip(1))
    asked = predictions(20_000, 9).clip(300)
    shares = calibrated.draw(asked, CAP, np.random.default_rng(5)) / asked
    # The prior counts as 16 of 8,016 rollouts. The standard error of 0.2 among 8,000 is 0.0045; rounding changes
    # lengths by at most 1 %.
    assert np.mean(np.abs(5 * shares - 1) < 0.05) == pytest.approx(0.2, abs=0.015)
    assert np.mean(np.abs(shares - 1) < 0.05) == pytest.approx(0.8, abs=0.015)


def drawn(found_errors, predicted, seed=0):
    return found_errors.draw(np.asarray(predicted, float), np.random.default_rng(seed))


def test_normal_errors_are_drawn_normally_and_new():
    random = np.random.default_rng(1)
    errors = 0.4 * random.standard_normal(8000) - 0.1
    found = drawn(PredictionErrors(random.standard_normal(8000), errors), random.standard_normal(50_000))
    # The median of 250 errors per bin is off by 1.25 x 0.4 / sqrt(250), and over 32 bins by a sixth of that.
    assert found.mean() == pytest.approx(-0.1, abs=0.02)
    assert found.std() == pytest.approx(0.4, rel=0.05)
    # 3 of 1,000 normal errors lie beyond three standard deviations and are reused; all others are new.
    assert np.isin(found, errors).mean() < 0.01


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


def test_rollouts_reach_the_limit_as_often_as_before():
    random = np.random.default_rng(4)
    errors = np.where(random.random(6400) < 0.6, np.inf, 0.1 * random.standard_normal(6400))
    found = drawn(PredictionErrors(random.standard_normal(6400), errors), random.standard_normal(20_000))
    assert np.isinf(found).mean() == pytest.approx(0.6, abs=0.02)
    assert found[np.isfinite(found)].std() == pytest.approx(0.1, rel=0.1)
    # The finite errors have their own normal distribution.
    assert np.isin(found[np.isfinite(found)], errors).mean() < 0.02
    assert np.isinf(drawn(PredictionErrors(np.zeros(3), np.full(3, np.inf)), np.zeros(5))).all()
