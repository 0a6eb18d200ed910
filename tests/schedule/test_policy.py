import numpy as np
import pytest

from tests.schedule.clusters import cluster, forecast
from treering.errors import InputError
from treering.schedule.policy import Assignment, Forecast
from treering.schedule.traces.trace import Trace, TraceStep


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.nan, np.inf])
def test_a_forecast_that_is_no_length_is_refused_and_named(wrong):
    with pytest.raises(InputError, match=rf"positive number, got {wrong} and 1 more .* give a prompt"):
        forecast([3.0, wrong, wrong])


def test_a_forecast_of_nothing_or_without_its_prompts_is_refused():
    with pytest.raises(InputError, match="one or more rollouts"):
        forecast([])
    with pytest.raises(InputError, match="one or more rollouts"):
        Forecast(lengths=[1.0, 2.0], prompts=[0])


def test_an_order_names_every_rollout_once():
    for order in ([0, 0], [0], [1, 2]):
        with pytest.raises(InputError, match="an order names each of 2 rollouts once"):
            Assignment(workers=[0, 0], order=order)


def test_predicted_lengths_are_a_positive_length_for_each_rollout():
    for predicted in ([1.0], [1.0, 0.0], [1.0, np.nan]):
        with pytest.raises(InputError, match="one positive length a rollout"):
            Assignment(workers=[0, 0], order=[0, 1], predicted_lengths=predicted)


@pytest.mark.parametrize(("staleness", "versions"), [(0, [0, 1, 2, 3, 4]), (1, [0, 0, 1, 2, 3]), (3, [0, 0, 0, 0, 1])])
def test_a_step_is_sampled_by_the_weights_that_lie_the_staleness_behind(staleness, versions):
    assert [cluster(staleness=staleness).version_of(step) for step in range(1, 6)] == versions


def test_a_step_has_a_length_and_maybe_prompt_tokens_for_each_rollout():
    with pytest.raises(InputError, match="leave empty rollouts out"):
        TraceStep(lengths=[1, 0], forecast=forecast([1.0, 1.0]))
    with pytest.raises(InputError, match="leave empty rollouts out"):
        TraceStep(lengths=[1], forecast=forecast([1.0, 1.0]))
    for wrong in ([1], [1, -1]):
        with pytest.raises(InputError, match="number of prompt tokens, at least 0"):
            TraceStep(lengths=[1, 1], forecast=forecast([1.0, 1.0]), num_prompt_tokens=wrong)


def test_a_trace_has_steps_and_none_of_its_rollouts_is_too_long():
    with pytest.raises(InputError, match="at least one step"):
        Trace(steps=(), max_tokens=5)
    with pytest.raises(InputError, match="longer than max_tokens=5, got one of 6; raise it"):
        Trace(steps=(TraceStep(lengths=[5, 6], forecast=forecast([1.0, 1.0])),), max_tokens=5)
