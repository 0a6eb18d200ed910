"""The rollout log: every rollout once, by epoch, also after a kill."""

from pathlib import Path

import numpy as np
import pytest

from treering.data import Trajectory, read_trajectories
from treering.errors import StateError
from treering.rl.rollout_log import RolloutLog


def rows(step: int, count: int = 2) -> list[Trajectory]:
    return [Trajectory(task_id="q", trial=i, step=step, tokens=np.array([5, step, i], np.int32)) for i in range(count)]


def written(folder: Path, num_steps: int = 5) -> RolloutLog:
    """Two steps per epoch."""
    log = RolloutLog(folder)
    for step in range(1, num_steps + 1):
        log.write((step - 1) // 2, rows(step))
    return log


def steps_in(folder: Path) -> dict[str, list[int | None]]:
    files = sorted(folder.iterdir())
    return {file.name: [row.step for row in read_trajectories(file)] for file in files}


def test_each_epoch_has_a_file_with_the_lines_of_its_steps(tmp_path: Path) -> None:
    written(tmp_path / "rollouts")
    expected = {"epoch-000.jsonl": [1, 1, 2, 2], "epoch-001.jsonl": [3, 3, 4, 4], "epoch-002.jsonl": [5, 5]}
    assert steps_in(tmp_path / "rollouts") == expected


@pytest.mark.parametrize("resume_step", range(6))
def test_a_resumed_run_cuts_later_steps_off_and_goes_on(tmp_path: Path, resume_step: int) -> None:
    written(tmp_path)
    whole = steps_in(tmp_path)
    log = RolloutLog(tmp_path, resume_step=resume_step)
    left = [step for steps in steps_in(tmp_path).values() for step in steps]
    assert left == [step for step in range(1, resume_step + 1) for _ in range(2)]
    for step in range(resume_step + 1, 6):
        log.write((step - 1) // 2, rows(step))
    assert steps_in(tmp_path) == whole


def test_a_line_that_a_kill_left_half_written_is_cut_off(tmp_path: Path) -> None:
    written(tmp_path, num_steps=3)
    file = tmp_path / "epoch-001.jsonl"
    file.write_bytes(file.read_bytes()[:-7])
    RolloutLog(tmp_path, resume_step=3)
    assert steps_in(tmp_path)["epoch-001.jsonl"] == [3]


def test_a_new_run_refuses_the_rollouts_of_another_and_leaves_them_alone(tmp_path: Path) -> None:
    written(tmp_path)
    before = steps_in(tmp_path)
    with pytest.raises(StateError, match=r"epoch-000.jsonl is there; choose another run folder"):
        RolloutLog(tmp_path)
    assert steps_in(tmp_path) == before


def test_files_of_the_user_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "epoch-best.jsonl").write_text('{"step": 9}\n')
    RolloutLog(tmp_path, resume_step=0)
    assert (tmp_path / "epoch-best.jsonl").read_text() == '{"step": 9}\n'
