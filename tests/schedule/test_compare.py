from dataclasses import replace

import numpy as np
import pytest

from treering.schedule.cluster import Cluster
from treering.schedule.compare import ONE_STEP_OFF, SYNC, SYNC_LONGEST_FIRST, compare, policy_setups
from treering.schedule.latency import linear_latency
from treering.schedule.policies import POLICIES, make_policy
from treering.schedule.simulator.run import simulate
from treering.schedule.traces.synthetic import synthetic_trace


def case(seed=0):
    trace = synthetic_trace("lognormal:4,0.8,500", num_steps=4, num_rollouts=32, seed=seed)
    cluster = Cluster(
        num_workers=4,
        num_slots=8,
        max_tokens=500,
        staleness=1,
        latency=linear_latency(step_s=1.0, row_s=0.1, training_s=30.0),
    )
    return trace, cluster


def test_the_synchronous_loops_run_at_staleness_0_and_all_others_as_asked():
    everyone = policy_setups(2)
    assert [(setup.name, setup.staleness) for setup in everyone[:2]] == [(SYNC, 0), (SYNC_LONGEST_FIRST, 0)]
    assert [(setup.name, setup.policy, setup.staleness) for setup in everyone[2:]] == [
        (name, name, 2) for name in POLICIES
    ]
    assert "histopipe" in POLICIES
    assert everyone[0].policy == ONE_STEP_OFF


def test_a_result_is_what_the_simulator_says_of_the_policy_at_its_staleness():
    trace, cluster = case()
    names = [ONE_STEP_OFF, "longest_first"]
    results, timelines = compare(policy_setups(1, names), [(trace, cluster)])
    expected = {SYNC: (ONE_STEP_OFF, 0), ONE_STEP_OFF: (ONE_STEP_OFF, 1), "longest_first": ("longest_first", 1)}
    assert [result.policy for result in results] == [timeline.policy for timeline in timelines]
    assert {result.policy for result in results} == expected.keys()
    seconds = {}
    for result in results:
        policy, staleness = expected[result.policy]
        alone = simulate(make_policy(policy), trace, workers=replace(cluster, staleness=staleness))
        assert result.makespan_s == seconds.setdefault(result.policy, alone.makespan_s)
        assert (result.staleness, result.staleness_max) == (staleness, staleness)
        assert (result.bubble, result.bound_s) == (alone.bubble, alone.bound_s)
        assert result.throughput_of_bound == alone.throughput_of_bound
        assert result.tokens_per_s == alone.tokens_per_s
        assert (result.num_stolen, result.num_moved) == (alone.num_stolen, alone.num_moved)
    for result in results:
        assert result.speedup_over_sync == seconds[SYNC] / result.makespan_s


def test_several_traces_give_means_and_the_worst():
    cases = [case(seed) for seed in range(3)]
    apart = [compare(policy_setups(1, [ONE_STEP_OFF, "histopipe"]), [single])[0][-1] for single in cases]
    together = compare(policy_setups(1, [ONE_STEP_OFF, "histopipe"]), cases)[0][-1]
    assert together.policy == "histopipe"
    for name in ("makespan_s", "throughput_of_bound", "bubble", "speedup_over_sync"):
        assert getattr(together, name) == pytest.approx(np.mean([getattr(result, name) for result in apart]))
    assert together.worst_speedup_over_sync == min(result.speedup_over_sync for result in apart)
    assert together.worst_throughput_of_bound == min(result.throughput_of_bound for result in apart)
    assert together.choices == apart[0].choices
