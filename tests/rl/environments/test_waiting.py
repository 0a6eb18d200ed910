"""Waiting is logged as it happened, predicts the next epoch, and orders its starts; without a clock it is exactly 0."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.rl.environments.worlds import WORLDS, World, collect, engine_of, model_of, task_of, user
from treering.data import append_trajectories, read_trajectories
from treering.rl.environments.collect_episodes import EpisodeForecast
from treering.rl.environments.environment import EnvTask
from treering.rl.environments.policy_calls import Policy, TurnClock
from treering.rl.step_report import as_trajectories
from treering.schedule.rollout_logs import read_log


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of()


class Clock:
    """A clock, and a loop that pauses whenever time passes."""

    def __init__(self) -> None:
        self.time_s, self.num_pauses = 5.0, 7

    def wait(self, seconds: float) -> None:
        self.time_s, self.num_pauses = self.time_s + seconds, self.num_pauses + 1

    def turn_clock(self) -> TurnClock:
        return TurnClock(lambda: self.num_pauses, lambda: self.time_s)


def test_a_run_waits_while_no_call_is_open() -> None:
    clock = Clock()
    turns = clock.turn_clock()
    clock.wait(0.5)
    turns.note_asked()
    clock.wait(9.0)
    turns.note_asked()
    turns.note_answered(3)
    clock.wait(9.0)
    turns.note_answered(4)
    clock.wait(2.0)
    turns.note_asked()
    turns.note_answered(5)
    clock.wait(0.25)
    assert turns.turns() == ((0, 0.5), (7, 2.0), (5, 0.25))


def test_time_in_which_the_loop_never_paused_does_not_count_as_waiting() -> None:
    clock = Clock()
    turns = clock.turn_clock()
    for _ in range(2):
        clock.time_s += 1.0
        turns.note_asked()
        clock.wait(9.0)
        turns.note_answered(2)
    clock.time_s += 1.0
    assert turns.turns() == ((2, 0.0), (2, 0.0))


class Sleeping(World):
    """Environment of two turns, with a tool between them that takes time only for the last task."""

    async def run(self, task: EnvTask, policy: Policy) -> float:
        reply = await policy.chat([user(f"task {task.data}")])
        if task.data == 1:
            await asyncio.sleep(0.05)
        last = await policy.chat([user(f"task {task.data}"), reply.message, user("and?")])
        return self.reward([reply.text, last.text])


def test_runs_log_their_turns_once_and_a_log_of_them_is_replayed(model: PreTrainedModel, tmp_path: Path) -> None:
    groups = collect(engine_of(model), task_of(Sleeping()), num_tasks=2, group_size=2).groups
    file = tmp_path / "epoch-000.jsonl"
    append_trajectories(file, as_trajectories(groups, epoch=0, step=1))
    [step] = read_log(tmp_path)
    assert step.prompts == ("t0", "t0", "t1", "t1")
    assert step.turns is not None
    assert step.turns.num_turns.tolist() == [2] * 4
    # Exactly 0 for a task that reads no clock.
    assert (step.turns.total_wait_s[:2] == 0).all()
    assert (step.turns.total_wait_s[2:] >= 0.05).all()
    sampled = [int(rollout.loss_mask.sum()) for group in groups for rollout in group.rollouts]
    assert step.lengths.tolist() == sampled == step.turns.lengths.tolist()


@pytest.mark.parametrize("name", ["Rerendered", "TwoSeats"])
def test_the_calls_of_branches_are_what_they_train_and_turns_stand_once_a_run(
    model: PreTrainedModel, name: str, tmp_path: Path
) -> None:
    groups = collect(engine_of(model), task_of(WORLDS[name]()), num_tasks=1, group_size=2).groups
    trajectories = as_trajectories(groups, epoch=0, step=1)
    append_trajectories(tmp_path / "log.jsonl", trajectories)
    read = list(read_trajectories(tmp_path / "log.jsonl"))
    assert [each.episode for each in read] == [each.episode for each in trajectories]
    for each in trajectories:
        assert each.episode is not None
        assert each.loss_mask is not None
        mask = np.zeros_like(each.loss_mask)
        for call in each.episode.calls:
            mask[call.start : call.stop] = True
        assert np.array_equal(mask, each.loss_mask)
    with_turns = [each for each in trajectories if each.episode is not None and each.episode.turns]
    assert sorted(each.trial or 0 for each in with_turns) == [0, 1]


def test_the_longest_expected_spans_start_first_once_something_is_known(model: PreTrainedModel) -> None:
    forecast = EpisodeForecast()
    assert forecast.order(["t0", "t1"], 2) == [0, 1, 2, 3]
    forecast.observe(collect(engine_of(model), task_of(Sleeping()), num_tasks=2, group_size=2).groups)
    forecast.note_pace(1e-6)
    # The second task waited longer than any number of tokens takes.
    assert forecast.order(["t0", "t1"], 2) == [2, 3, 0, 1]
    resumed = EpisodeForecast()
    resumed.load_state(forecast.state())
    assert resumed.order(["t0", "t1"], 2) == [2, 3, 0, 1]
    assert resumed.state() == forecast.state()
