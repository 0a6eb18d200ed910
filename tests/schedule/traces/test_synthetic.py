import math

import numpy as np
import pytest

from treering.errors import InputError
from treering.schedule.traces.synthetic import parse_law, synthetic_trace


def drawn(text, count=40_000, seed=0):
    law = parse_law(text)
    return law.sample(np.random.default_rng(seed), count)


def test_a_lognormal_law_has_its_median_and_its_sigma():
    lengths = drawn("lognormal:8.2,0.8,16384")
    assert np.median(lengths) == pytest.approx(math.exp(8.2), rel=0.02)
    assert np.log(lengths).std() == pytest.approx(0.8, rel=0.02)


def test_an_exponential_law_has_its_mean_and_no_memory():
    lengths = drawn("exponential:5000")
    assert lengths.mean() == pytest.approx(5000, rel=0.02)
    assert (lengths > 5000).mean() == pytest.approx(math.exp(-1), rel=0.03)


def test_a_bimodal_law_has_its_share_of_long_ones():
    lengths = drawn("bimodal:100,10000,0.25,0.1")
    long = lengths > 1000
    assert long.mean() == pytest.approx(0.25, abs=0.01)
    assert np.median(lengths[long]) == pytest.approx(10_000, rel=0.02)
    assert np.median(lengths[~long]) == pytest.approx(100, rel=0.02)
    assert np.log(lengths[~long]).std() == pytest.approx(0.1, rel=0.03)
    # Without a spread it is 0.3.
    assert np.log(drawn("bimodal:100,100,0.5")).std() == pytest.approx(0.3, rel=0.03)


def pairs(trace):
    predicted = np.concatenate([step.forecast.lengths for step in trace.steps])
    return predicted, np.concatenate([step.lengths for step in trace.steps])


def test_predictions_miss_by_the_noise_that_was_asked_for():
    trace = synthetic_trace("lognormal:8.2,0.3", num_steps=4, num_rollouts=5000, noise=0.25, seed=1)
    predicted, actual = pairs(trace)
    assert [step.num_rollouts for step in trace.steps] == [5000] * 4
    errors = np.log(predicted / actual)
    assert errors.std() == pytest.approx(0.25, rel=0.03)
    assert errors.mean() == pytest.approx(0.0, abs=0.01)
    # The error has nothing to do with the length.
    assert np.corrcoef(errors, np.log(actual))[0, 1] == pytest.approx(0.0, abs=0.03)


def test_neither_lengths_nor_predictions_leave_the_limits():
    trace = synthetic_trace("lognormal:5,3,900", num_steps=3, num_rollouts=2000, noise=1.0, seed=1)
    assert trace.max_tokens == 900
    for values in pairs(trace):
        assert (values.min(), values.max()) == (1, 900)
    unlimited = synthetic_trace("exponential:100", num_steps=3, num_rollouts=2000, noise=1.0, seed=1)
    assert unlimited.max_tokens == pairs(unlimited)[1].max() == pairs(unlimited)[0].max()


@pytest.mark.parametrize("wrong", [{"num_steps": 0}, {"num_rollouts": 0}, {"noise": -1.0}, {"noise": np.nan}])
def test_counts_that_do_not_fit_are_refused(wrong):
    with pytest.raises(InputError):
        synthetic_trace("constant:5", seed=0, **{"num_steps": 1, "num_rollouts": 4} | wrong)


@pytest.mark.parametrize(
    "text",
    ["lognormal:8", "lognormal:8,-1", "lognormal:8,1,1.5", "lognormal:a,b", "exponential:0", "exponential:",
     "bimodal:5,4,0.5", "bimodal:3,4,1.5", "bimodal:3,4,0.5,1,2,3", "constant:1.5", "normal:1,2", "lognormal"],
)  # fmt: skip
def test_what_is_no_law_is_refused_with_how_it_is_written(text):
    name, colon, _ = text.partition(":")
    known = colon and name != "normal"
    with pytest.raises(InputError, match=f"got '{text}'; write {name}:" if known else r"lognormal:MU,SIGMA\[,MAX\]"):
        parse_law(text)


@pytest.mark.parametrize("spec", ["constant:5e18", "lognormal:60,1", "exponential:1e300"])
def test_lengths_that_no_rollout_has_are_refused(spec):
    with pytest.raises(InputError, match="at most 2,147,483,647 tokens, and the law of lengths gave"):
        synthetic_trace(spec, num_steps=1, num_rollouts=8, seed=0)
