"""A rollout that waits frees its slot, waits of 0 s change nothing, and no plan beats the bound."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.clusters import cluster, trace
from tests.schedule.simulator.test_events import rules_of
from tests.schedule.waits import WaitLaw, with_waits
from treering.errors import InputError
from treering.schedule.cluster import Cluster, linear_latency
from treering.schedule.histopipe import POLICIES, make_policy
from treering.schedule.simulated_step import StepRollouts, run_step
from treering.schedule.simulator import simulate
from treering.schedule.traces import Trace
from treering.schedule.turns import Turns, even_turns


def outcome_of(queues, rollouts, num_slots):
    """Return when each rollout ends, at one second per token for any number of rows."""
    turns = Turns.of(rollouts)
    work = StepRollouts(
        np.cumsum([0, *map(len, queues)]),
        np.array([rollout for queue in queues for rollout in queue], np.int64),
        turns.lengths,
        turns.lengths.astype(np.float64),
        np.zeros_like(turns.lengths),
        *turns.parts(),
    )
    return run_step(np.zeros(len(queues)), work, rules_of([0.0, *[1.0] * num_slots])).finished.tolist()


def second_by_second(queues, rollouts, num_slots):
    """Compute the same end times in steps of one second."""
    ended = {}
    queues, back = [deque(queue) for queue in queues], [deque() for _ in queues]
    running = [{} for _ in queues]
    left = [deque(turns) for turns in rollouts]
    due = []

    def fill(worker, now):
        while len(running[worker]) < num_slots and (back[worker] or queues[worker]):
            rollout = (back if back[worker] else queues)[worker].popleft()
            num_tokens, wait_s = left[rollout].popleft()
            # Without a wait the next turn continues in the same slot.
            while wait_s == 0 and left[rollout]:
                more, wait_s = left[rollout].popleft()
                num_tokens += more
            if num_tokens:
                running[worker][rollout] = [num_tokens, wait_s]
            else:
                leave(worker, rollout, wait_s, now)

    def leave(worker, rollout, wait_s, now):
        if left[rollout]:
            due.append((now + wait_s, rollout, worker))
        else:
            ended[rollout] = now + wait_s

    now = 0
    while len(ended) < len(rollouts):
        for worker in range(len(queues)):
            for rollout in [rollout for rollout, (num_tokens, _) in running[worker].items() if num_tokens == 0]:
                leave(worker, rollout, running[worker].pop(rollout)[1], now)
            fill(worker, now)
        for each in sorted(each for each in due if each[0] == now):
            due.remove(each)
            back[each[2]].append(each[1])
            fill(each[2], now)
        for rows in running:
            for row in rows.values():
                row[0] -= 1
        now += 1
    return [float(ended[rollout]) for rollout in range(len(rollouts))]


@st.composite
def waiting_steps(draw):
    num_workers, num_rollouts = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    queues = [[] for _ in range(num_workers)]
    for rollout in draw(st.permutations(range(num_rollouts))):
        queues[draw(st.integers(0, num_workers - 1))].append(rollout)
    turns = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4).map(float)), min_size=1, max_size=4)
    rollouts = [draw(turns) for _ in range(num_rollouts)]
    for rollout in rollouts:
        if draw(st.booleans()):
            rollout.insert(0, (0, float(draw(st.integers(1, 3)))))
    return queues, rollouts, draw(st.integers(1, 3))


@settings(max_examples=100, deadline=None)
@given(waiting_steps())
def test_waiting_rollouts_free_their_slots_and_come_back_in_order(step):
    queues, rollouts, num_slots = step
    assert outcome_of(queues, rollouts, num_slots) == second_by_second(queues, rollouts, num_slots)


def waiting_trace(workers: Cluster, seed: int, share: float = 0.5) -> Trace:
    lengths = np.random.default_rng(seed).integers(1, 60, (4, 24))
    law = WaitLaw(share=share, num_turns=3)
    return with_waits(trace(*lengths.tolist()), law, workers, noise=0.25, seed=seed)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("staleness", [0, 1])
def test_no_plan_ends_before_the_bound(name, staleness):
    for seed in range(3):
        workers = cluster(2, 3, staleness=staleness, latency=linear_latency(step_s=1.0, row_s=0.1, training_s=5.0))
        timeline = simulate(make_policy(name), waiting_trace(workers, seed), workers=workers)
        assert timeline.bound_s <= timeline.makespan_s * (1 + 1e-12)


@pytest.mark.parametrize("name", POLICIES)
def test_turns_without_waiting_change_no_plan_and_no_time(name):
    workers = cluster(2, 3, staleness=1, latency=linear_latency(step_s=1.0, row_s=0.1, training_s=5.0))
    plain = trace(*np.random.default_rng(0).integers(1, 60, (4, 24)).tolist())
    zeros = np.zeros(24)
    steps = [
        replace(
            step,
            turns=even_turns(step.lengths, zeros + 4, zeros),
            forecast=replace(step.forecast, num_turns=zeros + 4, wait_s=zeros),
        )
        for step in plain.steps
    ]
    timelines = [simulate(make_policy(name), each, workers=workers) for each in (plain, replace(plain, steps=steps))]
    for field in ("workers", "started_s", "ended_s", "sampled_s", "trained_s"):
        assert np.array_equal(*(getattr(timeline, field) for timeline in timelines))
    assert timelines[0].choices == timelines[1].choices
    assert timelines[0].bound_s == timelines[1].bound_s


def test_knowing_waits_pays_where_half_of_the_span_is_waiting():
    workers = cluster(4, 4, staleness=0, latency=linear_latency(step_s=1.0, row_s=0.0))
    lengths = np.random.default_rng(1).lognormal(4.0, 0.6, (4, 96)).astype(int) + 1
    law = WaitLaw(share=0.5)
    known = with_waits(trace(*lengths.tolist()), law, workers, noise=0.25, seed=1)
    blind = [replace(step, forecast=replace(step.forecast, num_turns=None, wait_s=None)) for step in known.steps]
    runs = [
        simulate(make_policy("histopipe"), each, workers=workers)
        for each in (known, replace(known, steps=tuple(blind)))
    ]
    assert runs[0].throughput_of_bound > 1 / 1.1
    assert runs[1].makespan_s > 1.15 * runs[0].makespan_s


def test_turns_that_do_not_belong_together_are_refused():
    with pytest.raises(InputError, match="at least one turn"):
        Turns(starts=[0, 0], num_tokens=[], wait_s=[])
    with pytest.raises(InputError, match="at least 0"):
        Turns.of([[(3, -1.0)]])
    (step,) = trace([5, 6]).steps
    with pytest.raises(InputError, match="must sum to its length"):
        replace(step, turns=Turns.of([[(5, 0.0)], [(5, 0.0)]]))
    with pytest.raises(InputError, match="predicted together"):
        replace(step.forecast, wait_s=np.zeros(2))
