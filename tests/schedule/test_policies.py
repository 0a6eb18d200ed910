import re
from dataclasses import replace

import numpy as np
import pytest

from tests.schedule.clusters import assignment_request, cluster, trace
from treering.errors import ConfigError
from treering.schedule.histopipe import POLICIES, make_policy
from treering.schedule.placement import Fifo, Placement, PlacementPolicy
from treering.schedule.simulator import simulate


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
