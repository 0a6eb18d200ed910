import numpy as np
import pytest

from tests.schedule.clusters import cluster, forecast
from treering.errors import InputError
from treering.schedule.policy import Assignment, Forecast
from treering.schedule.traces import Trace, TraceStep

TWO = {"lengths": [1, 1], "forecast": forecast([1.0, 1.0])}


@pytest.mark.parametrize(("staleness", "versions"), [(0, [0, 1, 2, 3, 4]), (1, [0, 0, 1, 2, 3]), (3, [0, 0, 0, 0, 1])])
def test_a_step_is_sampled_by_weights_that_are_staleness_steps_old(staleness, versions):
    assert [cluster(staleness=staleness).version_of(step) for step in range(1, 6)] == versions


@pytest.mark.parametrize(
    ("make", "fields", "rule"),
    [
        (Forecast, {"lengths": [3.0, np.nan, 0.0], "prompts": [0, 1, 2]}, "positive number, got nan and 1 more"),
        (Forecast, {"lengths": [], "prompts": []}, "one or more rollouts"),
        (Forecast, {"lengths": [1.0, 2.0], "prompts": [0]}, "one or more rollouts"),
        (Assignment, {"workers": [0, 0], "order": [0, 0]}, "order must name each of 2 rollouts once"),
        (Assignment, {"workers": [0, 0], "order": [0]}, "order must name each of 2 rollouts once"),
        (Assignment, {"workers": [0], "order": [0], "predicted_lengths": [0.0]}, "one positive length per rollout"),
        (
            Assignment,
            {"workers": [0], "order": [0], "predicted_lengths": [1.0, 1.0]},
            "one positive length per rollout",
        ),
        (TraceStep, TWO | {"lengths": [1, 0]}, "drop empty rollouts"),
        (TraceStep, TWO | {"lengths": [1]}, "drop empty rollouts"),
        (TraceStep, TWO | {"num_prompt_tokens": [1, -1]}, "num_prompt_tokens must be at least 0"),
        (Trace, {"steps": (), "max_tokens": 5}, "at least one step"),
        (Trace, {"steps": (TraceStep(**TWO | {"lengths": [5, 6]}),), "max_tokens": 5}, "got one of 6; raise it"),
    ],
)
def test_records_that_cannot_be_are_refused(make, fields, rule):
    with pytest.raises(InputError, match=rule):
        make(**fields)
