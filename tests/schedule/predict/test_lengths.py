import json

import numpy as np
import pytest

from treering.errors import ConfigError, InputError
from treering.schedule.predict.lengths import LengthPredictor, make_predictor

KINDS = ("median", "ema", "quantile")


def predictor_of(kind):
    return LengthPredictor(kind, guess=500.0)


def test_a_group_is_predicted_alike_and_prompts_in_order():
    lengths = predictor_of("median")
    lengths.observe("b", np.array([10, 20, 90]))
    lengths.observe(7, np.array([40]))
    assert lengths.predict([7, "b"], 3).tolist() == [40.0] * 3 + [20.0] * 3
    assert lengths.predict([7], 1).dtype == np.float64
    assert lengths.predict([], 3).shape == (0,)


@pytest.mark.parametrize(
    ("kind", "epochs", "expected"),
    [
        ("median", [[1000, 2000], [10, 20, 300, 400]], 160.0),
        ("ema", [[100], [200, 300, 900], [40]], 0.5 * 40 + 0.5 * (0.5 * 300 + 0.5 * 100)),
        # The upper quartile of 100, 200, 300, 400 and 500.
        ("quantile", [[900, 950], [100, 200], [300, 400, 500]], 400.0),
    ],
)
def test_a_prompt_is_predicted_from_its_latest_epochs(kind, epochs, expected):
    lengths = predictor_of(kind)
    for epoch in epochs:
        lengths.observe("a", epoch)
    assert lengths.predict(["a"], 1).tolist() == [expected]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_without_history_get_the_median_of_all_others(kind):
    lengths = predictor_of(kind)
    assert lengths.predict(["a", "b"], 2).tolist() == [500.0] * 4
    for prompt, length in (("a", 10), ("b", 90), ("c", 40)):
        lengths.observe(prompt, [length])
    assert lengths.predict(["d", "c"], 1).tolist() == [40.0, 40.0]
    lengths.observe("d", [80])
    assert lengths.predict(["e"], 1).tolist() == [60.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_predictor_goes_on_from_its_state(kind):
    random = np.random.default_rng(0)
    steps = [(int(prompt), random.integers(1, 900, 4)) for prompt in random.integers(0, 3, 12)]
    whole, first = predictor_of(kind), predictor_of(kind)
    for prompt, lengths in steps:
        whole.observe(prompt, lengths)
    for prompt, lengths in steps[:6]:
        first.observe(prompt, lengths)
    # As a checkpoint keeps it: text, which later observations cannot reach.
    state = json.loads(json.dumps(first.state()))
    first.observe(0, np.array([7]))
    resumed = predictor_of(kind)
    resumed.observe("forgotten", [3])
    resumed.load_state(state)
    for prompt, lengths in steps[6:]:
        resumed.observe(prompt, lengths)
    prompts = [0, 1, 2, "0", "forgotten"]
    assert np.array_equal(resumed.predict(prompts, 2), whole.predict(prompts, 2))
    assert resumed.state() == whole.state()


@pytest.mark.parametrize("lengths", [[], [0], [-3, 4], [1.5], [[1]]])
def test_lengths_that_are_none_are_refused(lengths):
    with pytest.raises(InputError, match="whole numbers from 1 on"):
        predictor_of("median").observe("a", lengths)


def test_what_is_no_predictor_no_guess_or_the_state_of_another_is_refused():
    for name, guess, rule in (("mean", 1.0, "median, ema, quantile, got 'mean'"), ("ema", 0.0, "guessed above 0")):
        with pytest.raises(ConfigError, match=rule):
            LengthPredictor(name, guess=guess)
    with pytest.raises(InputError, match="ema resumes from its own state, got 'median''s"):
        predictor_of("ema").load_state(predictor_of("median").state())
    assert make_predictor("ema", max_tokens=1000).predict(["a"], 1).tolist() == [500.0]
