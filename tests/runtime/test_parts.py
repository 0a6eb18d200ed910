"""Accounts, queues and steps, without processes."""

from dataclasses import replace

import numpy as np
import pytest

from tests.runtime.runs import Noting, open_step, scheduler
from treering.errors import StateError
from treering.runtime.account import Account
from treering.runtime.open_step import OpenStep


def step_run(workers: list[int], **changes: object) -> OpenStep:
    """Return a step of two groups of four, in reversed order."""
    return open_step(workers, predicted=range(1, 9), order=np.arange(8)[::-1], **changes)


def names(requests: list) -> list[int]:
    return [4 * int(request.prompt_id[1]) + request.sample for request in requests]


def test_an_account_adds_up_or_is_refused() -> None:
    counts = Account(scheduled=8, sampled=8, evaluated=8, trained=4, without_variance=2, reward_errors=1, empty=1)
    counts.check(1)
    for name in ("scheduled", "sampled", "evaluated", "trained", "without_variance", "reward_errors", "empty"):
        for change in (-1, 1):
            wrong = replace(counts, **{name: getattr(counts, name) + change})
            with pytest.raises(StateError, match="step 3"):
                wrong.check(3)
    total = Account(worker_deaths=2)
    total.add(counts)
    total.add(counts)
    assert (total.trained, total.worker_deaths, total.as_dict()["scheduled"]) == (8, 2, 16)


def test_without_stealing_a_share_goes_out_at_once_in_the_scheduled_order() -> None:
    run = step_run([0, 0, 0, 1, 0, 0, 0, 1])
    assert names(run.take(0, num_running=0, max_batch=2)) == [6, 5, 4, 2, 1, 0]
    assert not run.has_work(0)
    assert names(run.take(1, num_running=0, max_batch=2)) == [7, 3]
    assert run.account.stolen == 0


def test_with_stealing_little_more_goes_out_than_can_run_and_the_longest_queue_is_stolen_from() -> None:
    run = step_run([0, 0, 0, 1, 0, 0, 0, 1], stealing="queued")
    assert names(run.take(0, num_running=0, max_batch=4)) == [6, 5, 4, 2, 1]
    assert names(run.take(1, num_running=0, max_batch=4)) == [7, 3, 0]
    assert run.account.stolen == 1
    assert names(run.take(1, num_running=3, max_batch=4)) == []


def test_any_worker_with_room_takes_the_requests_of_a_dead_one() -> None:
    run = step_run([0, 0, 0, 1, 0, 0, 0, 1])
    lost = run.take(0, num_running=0, max_batch=2)
    run.requeue(lost)
    run.release(1)
    assert run.account.sampled_again == 6
    assert run.has_work(1)
    assert names(run.take(1, num_running=1, max_batch=4)) == [6, 5, 4]
    assert names(run.take(0, num_running=0, max_batch=8)) == [2, 1, 0, 7, 3]


def test_a_policy_gets_up_to_four_forecasts_and_the_observed_lengths() -> None:
    policy = Noting()
    steps = scheduler(policy)
    steps.schedule(1)
    steps.schedule(2)
    steps.schedule(2)
    steps.observe(1, np.array([4, 4, 6, 6]))
    steps.schedule(3)
    assert policy.events == [
        ("assigned", 1, [40.0] * 4),
        ("assigned", 2, [40.0] * 4),
        ("learnt", 1, [4, 4, 6, 6]),
        # a, b and the unknown c are predicted at 4, 6 and the median 5.
        ("assigned", 3, [22.0, 20.0, 18.0]),
    ]


def test_restored_assignments_are_not_made_again() -> None:
    policies = Noting(), Noting(), Noting()
    first = scheduler(policies[0])
    for step in (1, 2):
        first.schedule(step)
    first.observe(1, np.array([4, 4, 6, 6]))
    second, other = scheduler(policies[1]), scheduler(policies[2], num_workers=3)
    second.load_state(first.state())
    other.load_state(first.state())
    for each in (first, second, other):
        each.schedule(2)
        each.schedule(3)
    assert policies[1].events == policies[0].events[2:]
    assert [(kind, step) for kind, step, _ in policies[2].events] == [("learnt", 1), ("assigned", 2), ("assigned", 3)]
    np.testing.assert_array_equal(first.schedule(2).assignment.workers, second.schedule(2).assignment.workers)
    assert other.schedule(2).assignment.workers.max() == 2
