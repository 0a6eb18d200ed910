from pathlib import Path

import numpy as np
import pytest
from benchmarks.draft.recording import read_recording

from tests.benchmarks.draft.recordings import recording
from treering.data import Trajectory, write_trajectories
from treering.errors import InputError


def test_tasks_are_numbered_as_they_appear_and_what_nobody_sampled_is_left_out() -> None:
    found = recording([("b", [1, 2], "01"), ("x", [1, 2], "00"), ("a", [3], "1"), ("b", [4], "1")])
    assert found.prompts.tolist() == [0, 1, 0]
    assert found.tokens.tolist() == [1, 2, 3, 4]
    with pytest.raises(InputError, match="none of 1 rollouts has any"):
        recording([("a", [1], "0")])


def test_a_generation_is_the_epoch_where_all_have_one() -> None:
    rollouts = [("a", [1], "1"), ("a", [2], "1")]
    assert recording(rollouts, epochs=[3, 5]).epochs.tolist() == [3, 5]
    assert recording(rollouts).epochs.tolist() == [0, 0]


def test_a_file_of_steps_has_steps_as_generations_and_unknown_rewards(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl.gz"
    given = [
        Trajectory(task_id="a", tokens=np.array([5], np.int32), step=7, reward=0.5),
        Trajectory(task_id="a", tokens=np.array([6], np.int32), step=9),
    ]
    write_trajectories(file, given)
    found, _ = read_recording(file, None)
    assert found.epochs.tolist() == [7, 9]
    assert found.rewards[0] == 0.5
    assert np.isnan(found.rewards[1])


def test_a_limit_takes_whole_tasks_by_a_seed_until_it_is_reached(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    tasks = [f"task {i % 10}" for i in range(30)]
    given = [Trajectory(task_id=task, tokens=np.full(1 + i % 7, i, np.int32)) for i, task in enumerate(tasks)]
    write_trajectories(file, given)
    sizes = {task: sum(own.tokens.size for own in given if own.task_id == task) for task in tasks}
    rollouts = {limit: set(read_recording(file, None, limit)[0].tokens.tolist()) for limit in (1, 40, 80, 1000)}
    for limit, taken in rollouts.items():
        found, notes = read_recording(file, None, limit)
        names = {tasks[i] for i in taken}
        assert taken == {i for i, task in enumerate(tasks) if task in names}
        assert found.tokens.tolist() == [token for own in given if own.task_id in names for token in own.tokens]
        assert notes[:1] == [] if len(names) == 10 else notes[0].startswith(f"{10 - len(names)} tasks were left out")
        total = sum(sizes[name] for name in names)
        # Without one of them it is not reached.
        assert total >= min(limit, sum(sizes.values()))
        assert len(names) == 10 or total - max(sizes[name] for name in names) < limit
    assert rollouts[1] < rollouts[40] < rollouts[80] < rollouts[1000]
    assert {tasks[i] for i in rollouts[1]} != {tasks[0]}
    assert {tasks[i] for i in rollouts[40]} != set(tasks[: len({tasks[i] for i in rollouts[40]})])
