import numpy as np
import pytest

from treering.schedule.migration import HYSTERESIS, LATE, saved_s

STEPS = 20 + 0.05 * np.arange(129)


def saved(generated, *, predicted=8000.0, max_tokens=16384.0, here=128, there=39, prefill_s=0.1, context=None):
    return saved_s(float(generated), predicted, max_tokens, here, there, STEPS, prefill_s, float(context or generated))


def test_the_example():
    # 2,500 more tokens at 22.0 instead of 26.4 s, for a prefill of 10,000 tokens.
    assert saved(10_000) == pytest.approx(2500 * 4.4 - 1.25 * 1000)


def test_a_rollout_within_its_prediction_stays():
    assert saved(LATE * 8000 - 1) == 0
    assert saved(LATE * 8000 + 1) > 0


def test_a_rollout_far_beyond_its_prediction_is_expected_to_run_as_long_again():
    # The rollout is 4,000 beyond a prediction of 6,000, so 4,000 more are expected, not a quarter of 10,000.
    assert saved(10_000, predicted=6000.0, prefill_s=0.0) == pytest.approx(4000 * 4.4)


def test_a_move_saves_more_than_it_costs_by_a_margin():
    costs = 2500 * 4.4 / HYSTERESIS / 10_000
    assert saved(10_000, prefill_s=costs * 1.001) < 0 < saved(10_000, prefill_s=costs * 0.999)
    # The prompt is prefilled too.
    assert saved(10_000, context=20_000) == pytest.approx(2500 * 4.4 - 1.25 * 2000)
