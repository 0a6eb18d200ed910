"""Plans use the measured times of the run, except with rebalancing "none"."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.runs import GIVEN, Noting, pipeline, scheduler
from treering.engine.protocol import EngineStats
from treering.runtime.rollout_worker import PassTimer
from treering.runtime.run_state import RunState
from treering.runtime.trainer_worker import TrainerClient
from treering.schedule.cluster import Latency
from treering.schedule.measured_latency import MeasuredTimes


def times(step_s: float, row_s: float, num_passes: int = 20) -> MeasuredTimes:
    found = MeasuredTimes()
    for rows in (1, 2, 4):
        for _ in range(num_passes):
            found.note_pass(step_s + row_s * rows, num_rows=rows, num_prefilled=0, num_sampled=rows)
    found.note_training(3.0)
    return found


def line(latency: Latency | None) -> list[float]:
    assert latency is not None
    return np.round(latency.token_s(2)[1:], 9).tolist()


def through_a_file(state: dict) -> dict:
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def test_schedules_use_the_given_times_until_some_are_measured() -> None:
    policy = Noting()
    steps = scheduler(policy)
    steps.schedule(1)
    steps.note_times(times(0.5, 0.25, num_passes=5))
    steps.schedule(2)
    steps.note_times(times(0.5, 0.25))
    steps.schedule(3)
    assert policy.latencies[1] is policy.latencies[2] is GIVEN
    assert line(policy.latencies[3]) == line(steps.measured) == [0.75, 1.0]
    assert policy.latencies[3].training_s == 3.0


def test_without_rebalancing_schedules_keep_the_given_times() -> None:
    policy = Noting()
    steps = scheduler(policy, rebalancing="none")
    steps.note_times(times(0.5, 0.25))
    steps.schedule(1)
    assert steps.measured is None
    assert policy.latencies[1] is GIVEN
    assert steps.state()["timed"] == []
    # Times of a checkpoint with other settings do not count either.
    other = scheduler(Noting())
    other.note_times(times(0.5, 0.25))
    steps.load_state(other.state())
    assert steps.measured is None


def stats(num_passes: int, num_rows: int, num_prefilled: int = 0) -> EngineStats:
    return EngineStats(num_forwards=num_passes, num_rows=num_rows, num_sampled=num_rows, num_prefilled=num_prefilled)


def test_a_pass_is_timed_from_the_end_of_the_previous_one_or_from_its_start() -> None:
    readings = iter((0.0, 5.0, 6.0, 8.0, 20.0, 21.0))
    timer = PassTimer(lambda: next(readings))
    timer.note_engine(stats(7, 70))
    # From 0 to 5, the first one, and to 6 and 8; then nothing is left until 20.
    for count, left in ((1, 2), (2, 2), (3, 0), (4, 0)):
        timer.begin()
        timer.end(stats(7 + count, 70 + 2 * count, count), num_unfinished=left)
    expected = MeasuredTimes()
    for seconds in (1.0, 2.0, 1.0):
        expected.note_pass(seconds, num_rows=2, num_prefilled=1, num_sampled=2)
    assert timer.take() == expected
    assert timer.take() == MeasuredTimes()


def test_a_run_measures_its_passes_and_schedules_by_them() -> None:
    policy = Noting()
    with pipeline(num_steps=6, staleness=1, policy=policy) as loop:
        for _ in range(6):
            loop.step()
        state, measured = through_a_file(loop.state()), loop.measured
    assert np.array_equal(policy.latencies[1].token_s(3), GIVEN.token_s(3))
    assert measured is not None
    seconds = measured.token_s(3)[1:]
    # The given times are 20 s; a pass of this model takes milliseconds.
    assert (seconds > 0).all()
    assert (seconds < 10).all()
    assert 0 < measured.training_s < 60
    assert 0 < measured.load_s < 60
    with pipeline(num_steps=7, staleness=1, policy=Noting()) as again:
        again.load_state(state)
        assert again.measured is not None
        np.testing.assert_array_equal(again.measured.token_s(3), measured.token_s(3))


def test_a_step_is_scheduled_while_the_last_one_that_it_knows_of_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    staleness, policy = 1, Noting()
    events = policy.events
    monkeypatch.setattr(TrainerClient, "train", noting(TrainerClient.train, "sent", events))
    monkeypatch.setattr(RunState, "complete_step", noting(RunState.complete_step, "trained", events))
    with pipeline(num_steps=4, staleness=staleness, policy=policy) as loop:
        for _ in range(4):
            loop.step()
    first = [("assigned", step) for step in range(1, 2 + staleness)]
    for step in range(1, 5):
        later = step + 1 + staleness
        assigned = [("assigned", later)] if later <= 4 else []
        first += [("sent", step), ("learnt", step), *assigned, ("trained", step)]
    assert [event[:2] for event in events] == first


def noting(method: Callable[..., Any], name: str, events: list[tuple[Any, ...]]) -> Callable[..., Any]:
    """Wrap a method to record the step of its first argument."""

    def noted(self: Any, what: Any, *arguments: Any) -> Any:
        events.append((name, what if isinstance(what, int) else what.open_step.step))
        return method(self, what, *arguments)

    return noted
