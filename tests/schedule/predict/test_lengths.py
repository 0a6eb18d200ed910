import json

import numpy as np
import pytest

from treering.errors import ConfigError, InputError
from treering.schedule.predict import LengthPredictor, expected_lengths, make_predictor


def test_a_group_is_predicted_alike_and_prompts_in_order():
    lengths = LengthPredictor(guess=500.0)
    lengths.observe("b", np.array([10, 20, 90]))
    lengths.observe(7, np.array([40]))
    assert lengths.predict([7, "b"], 3).tolist() == [40.0] * 3 + [20.0] * 3
    assert lengths.predict([7], 1).dtype == np.float64
    assert lengths.predict([], 3).shape == (0,)


def test_a_prompt_is_predicted_by_the_median_of_its_latest_rollouts():
    lengths = make_predictor(max_tokens=1000)
    assert lengths.predict(["a"], 1).tolist() == [500.0]
    for epoch, expected in (([1000, 2000], 1500.0), ([10, 20, 300, 400], 160.0)):
        lengths.observe("a", epoch)
        assert lengths.predict(["a"], 1).tolist() == [expected]


def test_prompts_without_history_get_the_median_of_all_others():
    lengths = LengthPredictor(guess=500.0)
    assert lengths.predict(["a", "b"], 2).tolist() == [500.0] * 4
    for prompt, length in (("a", 10), ("b", 90), ("c", 40)):
        lengths.observe(prompt, [length])
    assert lengths.predict(["d", "c"], 1).tolist() == [40.0, 40.0]
    lengths.observe("d", [80])
    assert lengths.predict(["e"], 1).tolist() == [60.0]


def test_a_predictor_resumes_from_its_state():
    random = np.random.default_rng(0)
    steps = [(int(prompt), random.integers(1, 900, 4)) for prompt in random.integers(0, 3, 12)]
    whole, first = LengthPredictor(guess=500.0), LengthPredictor(guess=500.0)
    for prompt, lengths in steps:
        whole.observe(prompt, lengths)
    for prompt, lengths in steps[:6]:
        first.observe(prompt, lengths)
    # Convert the state to text, as a checkpoint does, so that later observations cannot change it.
    state = json.loads(json.dumps(first.state()))
    first.observe(0, np.array([7]))
    resumed = LengthPredictor(guess=500.0)
    resumed.observe("forgotten", [3])
    resumed.load_state(state)
    for prompt, lengths in steps[6:]:
        resumed.observe(prompt, lengths)
    prompts = [0, 1, 2, "0", "forgotten"]
    assert np.array_equal(resumed.predict(prompts, 2), whole.predict(prompts, 2))
    assert resumed.state() == whole.state()


@pytest.mark.parametrize("lengths", [[], [0], [-3, 4], [1.5], [[1]]])
def test_lengths_that_are_none_are_refused(lengths):
    with pytest.raises(InputError, match="integers of at least 1"):
        LengthPredictor(guess=1.0).observe("a", lengths)


@pytest.mark.parametrize("guess", [0.0, -1.0, np.nan, np.inf])
def test_an_invalid_guess_is_refused(guess):
    with pytest.raises(ConfigError, match="guessed length must be above 0"):
        LengthPredictor(guess=guess)


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
