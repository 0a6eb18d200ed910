"""The weights benchmark: what a controller spends grows with messages, and with the square of the workers."""

import pytest
from benchmarks.weights.scale import ROLLOUTS_PER_WORKER, scaled

COSTS = {"message_s": 1e-4, "wake_s": 1e-5, "offer_s": 1e-3}


def test_messages_grow_with_the_workers_and_wakes_with_their_square() -> None:
    few, many = scaled(2, 0.0, COSTS), scaled(6, 0.0, COSTS)
    assert few["messages_s"] == pytest.approx(2 * ROLLOUTS_PER_WORKER * 4 * 1e-4)
    assert many["messages_s"] == pytest.approx(3 * few["messages_s"])
    assert few["wakes_s"] == pytest.approx(2 * ROLLOUTS_PER_WORKER * 2 * 2 * 1e-5)
    assert many["wakes_s"] == pytest.approx(9 * few["wakes_s"])


def test_a_hand_over_lengthens_steps_by_no_more_than_itself() -> None:
    row = scaled(3, 2.0, COSTS)
    assert row["load_s"] == pytest.approx(2.0 + 3 * 1e-3)
    assert 0 < row["step_s"] - row["step_without_load_s"] <= row["load_s"]
