from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.clusters import cluster, forecast, trace
from tests.schedule.simulator import small_optimum
from treering.errors import InputError
from treering.schedule.cluster import Cluster, linear_latency
from treering.schedule.histopipe import POLICIES, HistoPipe, make_policy
from treering.schedule.policy import Assignment, SchedulePolicy
from treering.schedule.simulator import NUM_FORECASTS, simulate
from treering.schedule.traces import Trace, TraceStep


class Fixed(SchedulePolicy):
    """Policy that returns fixed assignments and records its calls."""

    def __init__(self, *assignments):
        self._assignments = list(assignments)
        self.told = []

    @property
    def name(self):
        return "fixed"

    def assign(self, request):
        self.told.append(("assign", request.step, len(request.forecasts), request.cluster))
        return self._assignments.pop(0)

    def learn(self, step, predicted, lengths):
        self.told.append(("learn", step, predicted.tolist(), lengths.tolist()))


def alone(num_rollouts, worker=0):
    return Assignment(workers=[worker] * num_rollouts, order=range(num_rollouts))


def random_run(seed, *, num_steps=6, num_rollouts=40):
    """Return a trace with noise and prompts, and a cluster with nonzero latencies."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(num_steps):
        size = int(rng.integers(1, num_rollouts))
        lengths = rng.lognormal(4, 0.8, size).clip(1, 500).astype(np.int64)
        told = forecast(lengths * np.exp(0.3 * rng.standard_normal(size)), rng.integers(0, 5, size))
        steps.append(TraceStep(lengths=lengths, forecast=told, num_prompt_tokens=rng.integers(0, 50, size)))
    latency = linear_latency(step_s=2.0, row_s=0.1, prefill_s=0.02, load_s=10.0, training_s=50.0)
    staleness, slots = int(rng.integers(0, 4)), int(rng.integers(1, 9))
    where = cluster(int(rng.integers(1, 8)), slots, staleness=staleness, max_tokens=500, latency=latency)
    return Trace(steps=tuple(steps), max_tokens=500), where


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_every_run_obeys_the_laws(name, seed):
    run, where = random_run(seed)
    timeline = simulate(make_policy(name), run, workers=where)
    num_rollouts = sum(step.num_rollouts for step in run.steps)
    # Nothing beats the bound, and the totals match the spans.
    assert timeline.bound_s <= timeline.makespan_s * (1 + 1e-12)
    assert timeline.num_rollouts.sum() == num_rollouts
    assert timeline.num_tokens == sum(int(step.lengths.sum()) for step in run.steps)
    assert timeline.staleness_max == min(where.staleness, len(run.steps) - 1)
    assert 0 <= timeline.bubble < 1
    for step in range(1, len(run.steps) + 1):
        mine = timeline.steps == step
        assert timeline.workers[mine].size == np.unique(timeline.workers[mine]).size
        assert timeline.ended_s[mine & (timeline.num_rollouts > 0)].max() == pytest.approx(timeline.sampled_s[step - 1])
        before = timeline.trained_s[step - 2] if step > 1 else 0.0
        assert timeline.trained_s[step - 1] == max(before, timeline.sampled_s[step - 1]) + 50
        # The weights are there and loaded before the first rollout.
        version = where.version_of(step)
        opened = timeline.trained_s[version - 1] + 10 if version else 0.0
        assert (timeline.started_s[mine] >= opened).all()
    for worker in range(where.num_workers):
        mine = timeline.workers == worker
        assert (np.diff(timeline.steps[mine]) > 0).all()
        assert (timeline.started_s[mine][1:] >= timeline.ended_s[mine][:-1]).all()
        assert (timeline.ended_s[mine] >= timeline.started_s[mine]).all()


def test_a_run_by_hand():
    # Worker 0 runs lengths 4 and 2 of the first step and nothing of the second; worker 1 runs the rest.
    first = Assignment(workers=[0, 0, 1], order=[0, 1, 2])
    second = Assignment(workers=[1, 1, 1], order=[0, 1, 2])
    run = trace([4, 2, 1], [3, 3, 3], [1])
    latency = linear_latency(step_s=1.0, row_s=0.5, load_s=10.0, training_s=100.0)
    policy = Fixed(first, second, alone(1))
    timeline = simulate(policy, run, workers=cluster(2, 2, latency=latency))
    spans = [timeline.workers, timeline.steps, timeline.started_s, timeline.ended_s, timeline.num_rollouts]
    # A token takes 2 s with two rows and 1.5 s with one: 4 + 3 s, then 1.5 s. In the second step two rollouts take 6 s
    # and one 4.5 s. The third step waits for the weights of the first and loads them.
    assert [span.tolist() for span in spans] == [
        [0, 1, 1, 0],
        [1, 1, 2, 3],
        [0, 0, 1.5, 117],
        [7, 1.5, 12, 118.5],
        [2, 1, 3, 1],
    ]
    assert timeline.sampled_s.tolist() == [7, 12, 118.5]
    assert timeline.trained_s.tolist() == [107, 207, 307]
    assert timeline.makespan_s == 307
    assert timeline.tokens_per_s == 17 / 307
    assert timeline.bubble == pytest.approx(1 - (7 + 1.5 + 10.5 + 1.5) / (2 * 118.5))
    assert (timeline.policy, timeline.choices) == ("fixed", ())


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_policy_learns_each_step_once_in_order_and_none_that_is_not_done(staleness):
    run = trace(*[[step] for step in range(1, 6)], predicted=[[10 * step] for step in range(1, 6)])
    policy = Fixed(*[alone(1)] * 5)
    simulate(policy, run, workers=cluster(staleness=staleness))
    expected = []
    for step in range(1, 6):
        if step - 1 - staleness >= 1:
            known = step - 1 - staleness
            expected.append(("learn", known, [10.0 * known], [known]))
        expected.append(("assign", step, min(NUM_FORECASTS, 6 - step)))
    assert [told[:3] if told[0] == "assign" else told for told in policy.told] == expected


@pytest.mark.parametrize(
    ("assignment", "got"),
    [
        (alone(2, worker=2), r"got 2 workers, 2 of them absent \(\[2, 2\]\)"),
        (alone(2, worker=-1), r"got 2 workers, 2 of them absent \(\[-1, -1\]\)"),
        (alone(3), "got 3 workers, 0 of them"),
        (alone(0), "got 0 workers, 0 of them"),
    ],
)
def test_an_assignment_that_cannot_be_is_refused(assignment, got):
    with pytest.raises(InputError, match=rf"each of 2 rollouts a worker from 0 to 1, {got}.*; correct the policy"):
        simulate(Fixed(assignment), trace([1, 1]), workers=cluster(2, 2))


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=4)
BASELINES = [name for name in POLICIES if name != "histopipe"]


def small_case(steps, num_slots, staleness):
    """Return a trace, its cluster and the shortest possible time."""
    latency = linear_latency(step_s=1.0, row_s=0.5, training_s=2.0)
    where = cluster(2, num_slots, staleness=staleness, max_tokens=9, latency=latency)
    token_s = latency.token_s(num_slots).tolist()
    best = small_optimum.makespan(steps, num_workers=2, token_s=token_s, staleness=staleness, training_s=2.0)
    return trace(*steps, max_tokens=9), where, best


@settings(max_examples=30, deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=2), st.integers(1, 2), st.integers(0, 1))
def test_no_baseline_beats_the_exact_optimum_and_that_not_the_bound(steps, num_slots, staleness):
    run, where, best = small_case(steps, num_slots, staleness)
    for name in BASELINES:
        timeline = simulate(make_policy(name), run, workers=where)
        assert timeline.makespan_s >= best - 1e-9, name
        assert timeline.bound_s <= best + 1e-9


def test_a_policy_sees_predictions_and_workers_take_real_lengths():
    run, where, wrong = trace([9, 5], [7, 3]), cluster(1, 2, step_s=1.0), cluster(1, 2, step_s=3.0)
    policies = [Fixed(alone(2), alone(2)) for _ in range(2)]
    right, misled = (
        simulate(policy, run, workers=where, believed=believed)
        for policy, believed in zip(policies, (None, wrong), strict=True)
    )
    told = [[event[-1] for event in policy.told if event[0] == "assign"] for policy in policies]
    assert all(each is where for each in told[0])
    assert all(each is wrong for each in told[1])
    assert misled.trained_s.tolist() == right.trained_s.tolist()


def test_a_number_of_workers_means_that_many_standard_ones():
    run = trace([400] * 512, [400] * 512, max_tokens=400)
    latency = linear_latency(step_s=20.0, row_s=0.05)
    # Two workers of 128 slots take 26.4 s per step. An update takes 7 % of 512 x 400 tokens at 26.4 / 128 s, halved.
    training_s = 0.07 * 512 * 400 * 26.4 / 128 / 2
    spelt_out = Cluster(
        num_workers=2,
        num_slots=128,
        max_tokens=400,
        staleness=1,
        latency=replace(latency, training_s=training_s),
    )
    one, other = (simulate(make_policy("fifo"), run, workers=workers) for workers in (2, spelt_out))
    assert one.makespan_s == pytest.approx(other.makespan_s, rel=1e-12)
    # Each worker runs 256 rollouts per step in two waves, both steps in sequence; only the second update is not hidden.
    assert one.makespan_s == pytest.approx(4 * 400 * 26.4 + training_s, rel=1e-12)


@pytest.mark.parametrize(("num_steps", "num_slots", "staleness"), [(1, 1, 0), (1, 2, 0), (2, 1, 0), (2, 1, 1)])
def test_histopipe_is_near_the_exact_optimum(num_steps, num_slots, staleness):
    """Within Graham's bound of two workers for each step."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        steps = [rng.integers(1, 10, 6 - num_steps).tolist() for _ in range(num_steps)]
        run, where, best = small_case(steps, num_slots, staleness)
        found = simulate(HistoPipe(sigma=0.01), run, workers=where).makespan_s
        assert best - 1e-9 <= found <= (7 / 6 if num_steps == 1 else 4 / 3) * best
