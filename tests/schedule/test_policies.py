import re
from dataclasses import replace

import numpy as np
import pytest

from tests.schedule.clusters import assignment_request, cluster, forecast, trace
from treering.errors import ConfigError, InputError
from treering.schedule.histopipe import POLICIES, make_policy
from treering.schedule.placement import Fifo, Placement, PlacementPolicy
from treering.schedule.policy import Assignment, Forecast
from treering.schedule.simulator import simulate
from treering.schedule.traces import Trace, TraceStep


def test_fifo_deals_new_random_shards_of_equal_size_in_each_step():
    where, lengths = cluster(4, 2), np.arange(1.0, 103.0)
    shares = [Fifo().assign(assignment_request(where, lengths, step=step)) for step in (1, 2, 1)]
    for share in shares:
        assert sorted(np.bincount(share.workers).tolist()) == [25, 25, 26, 26]
        assert share.order.tolist() == list(range(102))
        assert share.stealing == "off"
    assert shares[0].workers.tolist() == shares[2].workers.tolist() != shares[1].workers.tolist()
    # Predictions do not matter; the seed does.
    flat = Fifo().assign(assignment_request(where, np.ones(102)))
    assert flat.workers.tolist() == shares[0].workers.tolist()
    assert Fifo(seed=1).assign(assignment_request(where, lengths)).workers.tolist() != shares[0].workers.tolist()


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("rebalancing", ["none", "queued", "running"])
def test_no_policy_asks_for_more_than_workers_can_do(name, rebalancing):
    where = replace(cluster(4, 4, row_s=0.05), rebalancing=rebalancing)
    assignment = make_policy(name).assign(assignment_request(where, np.geomspace(10, 900, 64)))
    assert assignment.stealing == "off" or rebalancing != "none"
    assert assignment.moving == "off" or rebalancing == "running"


@pytest.mark.parametrize(("rebalancing", "num_stolen"), [("none", 0), ("queued", 1)])
def test_forbidden_moves_do_not_happen(rebalancing, num_stolen):
    """The shares are [9, 9, 1] and [1, 1, 1]; the second worker takes a 9, which ends at 12."""
    where = replace(cluster(2, 1), rebalancing=rebalancing)
    policy = PlacementPolicy(Placement(name="steals", stealing="queued"))
    run = trace([9, 1, 9, 1, 1, 1], predicted=[[10, 10, 10, 10, 10, 10]])
    timeline = simulate(policy, run, workers=where)
    assert timeline.num_stolen == num_stolen
    assert timeline.sampled_s.tolist() == ([12] if num_stolen else [19])


def test_policies_have_the_names_that_they_are_made_by_and_others_are_refused_with_the_nearest():
    assert [make_policy(name).name for name in POLICIES] == [*POLICIES]
    for wrong, near in (("fifi", "fifo"), ("?", "histopipe")):
        with pytest.raises(ConfigError, match=re.escape(f"got {wrong!r}; did you mean {near!r}?")):
            make_policy(wrong)


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
