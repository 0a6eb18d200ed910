import math

import numpy as np
import pytest

from treering.errors import InputError
from treering.schedule.traces import synthetic_trace


def pairs(trace):
    predicted = np.concatenate([step.forecast.lengths for step in trace.steps])
    return predicted, np.concatenate([step.lengths for step in trace.steps])


def test_a_lognormal_law_has_its_median_and_its_sigma():
    trace = synthetic_trace("lognormal:8.2,0.8", num_steps=1, num_rollouts=40_000, seed=0)
    lengths = trace.steps[0].lengths
    assert np.median(lengths) == pytest.approx(math.exp(8.2), rel=0.02)
    assert np.log(lengths).std() == pytest.approx(0.8, rel=0.02)


def test_predictions_miss_by_the_noise_that_was_asked_for():
    trace = synthetic_trace("lognormal:8.2,0.3", num_steps=4, num_rollouts=5000, noise=0.25, seed=1)
    predicted, actual = pairs(trace)
    assert [step.num_rollouts for step in trace.steps] == [5000] * 4
    errors = np.log(predicted / actual)
    assert errors.std() == pytest.approx(0.25, rel=0.03)
    assert errors.mean() == pytest.approx(0.0, abs=0.01)
    # The error does not depend on the length.
    assert np.corrcoef(errors, np.log(actual))[0, 1] == pytest.approx(0.0, abs=0.03)


def test_neither_lengths_nor_predictions_leave_the_limits():
    trace = synthetic_trace("lognormal:5,3,900", num_steps=3, num_rollouts=2000, noise=1.0, seed=1)
    assert trace.max_tokens == 900
    for values in pairs(trace):
        assert (values.min(), values.max()) == (1, 900)
    unlimited = synthetic_trace("lognormal:5,3", num_steps=3, num_rollouts=2000, noise=1.0, seed=1)
    assert unlimited.max_tokens == pairs(unlimited)[1].max() == pairs(unlimited)[0].max()


@pytest.mark.parametrize("wrong", [{"num_steps": 0}, {"num_rollouts": 0}, {"noise": -1.0}, {"noise": np.nan}])
def test_counts_that_do_not_fit_are_refused(wrong):
    with pytest.raises(InputError):
        synthetic_trace("lognormal:2,0", seed=0, **{"num_steps": 1, "num_rollouts": 4} | wrong)


@pytest.mark.parametrize(
    "law",
    ["lognormal:8", "lognormal:8,-1", "lognormal:8,1,1.5", "lognormal:a,b", "lognormal:8,1,0", "lognormal:8,1,9,9",
     "lognormal:nan,1", "constant:5", "lognormal"],
)  # fmt: skip
def test_an_invalid_law_is_refused_with_the_right_form(law):
    with pytest.raises(InputError, match=f"a law of lengths must be lognormal:MU,SIGMA .* got '{law}'"):
        synthetic_trace(law, num_steps=1, num_rollouts=1, seed=0)


@pytest.mark.parametrize("law", ["lognormal:60,1", "lognormal:800,1"])
def test_lengths_that_no_rollout_has_are_refused(law):
    with pytest.raises(InputError, match="at most 2,147,483,647 tokens, but the law of lengths gave"):
        synthetic_trace(law, num_steps=1, num_rollouts=8, seed=0)
