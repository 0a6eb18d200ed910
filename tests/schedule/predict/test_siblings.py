import numpy as np
import pytest

from treering.schedule.predict import expected_lengths


def expect(running, finished, *, ratios=(1.0,), predicted=100.0, max_tokens=10_000):
    found = expected_lengths(running, finished, predicted=predicted, ratios=ratios, max_tokens=max_tokens)
    return found.tolist()


def test_before_anything_has_ended_it_is_the_mean_of_what_was_predicted():
    assert expect([0, 0, 0], [], ratios=[0.5, 1.0, 1.5]) == pytest.approx([100.0] * 3)
    # Only 100 and 150 of the three predictions exceed 60, and only 150 exceeds 100.
    assert expect([60], [], ratios=[0.5, 1.0, 1.5]) == pytest.approx([125.0])
    assert expect([100], [], ratios=[0.5, 1.0, 1.5]) == pytest.approx([150.0])


def test_a_sibling_that_runs_on_makes_later_ones_longer():
    alone = expect([0], [], ratios=[1.0, 10.0])
    beside = expect([0, 900], [], ratios=[1.0, 10.0])
    assert alone == pytest.approx([550.0])
    # At 100, a weight of 1 of the 3 that got so far ends; at 1,000 the rest does.
    assert beside == pytest.approx([100 / 3 + 1000 * 2 / 3, 1000.0])


def test_a_rollout_longer_than_all_known_is_expected_to_double():
    assert expect([300], []) == [600.0]
    # The longest still runs, so the others may get as far.
    [short, long] = expect([50, 300], [])
    assert long == 600.0
    # At 100, a weight of 2 of 3 ends; the rest ends where the longest does.
    assert short == pytest.approx(100 * 2 / 3 + 600 / 3)


def test_no_expectation_is_beyond_the_limit():
    assert expect([300, 500], [], max_tokens=500) == [500.0, 500.0]
    assert expect([0], [], ratios=[9.0], max_tokens=500) == [500.0]


@pytest.mark.parametrize("seed", range(8))
def test_a_rollout_is_expected_beyond_what_it_has_and_more_the_more_it_has(seed):
    random = np.random.default_rng(seed)
    running = np.sort(random.integers(0, 2000, 6))
    finished = random.integers(1, 2000, random.integers(0, 5))
    ratios = random.lognormal(0.0, 0.7, 20)
    found = expected_lengths(running, finished, predicted=600.0, ratios=ratios, max_tokens=5000)
    assert (found > running).all()
    assert (np.diff(found) >= -1e-9).all()
