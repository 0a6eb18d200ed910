"""Groups as trajectory records, and their log: every rollout once, by epoch, also after a kill."""

from pathlib import Path

import numpy as np
import pytest

from tests.rl.rollouts import prompt_of, rollout_of
from treering.data import Trajectory, read_trajectories
from treering.errors import InputError, StateError
from treering.rl.collect import Group
from treering.rl.step_report import RolloutLog, as_trajectories

FIRST = rollout_of(
    [7, 9, 8],
    prompt_id="a",
    sample=2,
    loss_mask=[1, 0, 1],
    logprobs=[-0.5, 0.0, -0.25],
    versions=[3, 3, 4],
    reward=1.0,
)
GROUPS = [
    Group(prompt=prompt_of(1, 2, prompt_id="a"), rollouts=(FIRST,)),
    Group(prompt=prompt_of(6, prompt_id="none left"), rollouts=()),
    Group(
        prompt=prompt_of(5, prompt_id=4),
        rollouts=tuple(rollout_of([3], prompt_id=4, sample=i, reward=float(i)) for i in range(2)),
    ),
]


def test_a_trajectory_is_prompt_and_rollout_with_what_is_known() -> None:
    first, *rest = as_trajectories(GROUPS, epoch=2, step=9)
    assert (first.task_id, first.trial, first.epoch, first.step, first.version) == ("a", 2, 2, 9, 4)
    assert np.array_equal(first.tokens, [1, 2, 7, 9, 8])
    assert np.array_equal(first.loss_mask, [0, 0, 1, 0, 1])
    assert np.array_equal(first.logprobs, [0, 0, -0.5, 0, -0.25])
    assert (first.reward, first.advantage) == (1.0, None)
    assert [(t.task_id, t.trial, t.reward) for t in rest] == [(4, 0, 0.0), (4, 1, 1.0)]


def test_advantages_are_logged_with_their_rollouts() -> None:
    advantages = [np.array([0.5]), np.zeros(0), np.array([-1.0, 1.0])]
    trajectories = as_trajectories(GROUPS, epoch=0, step=1, advantages=advantages)
    assert [t.advantage for t in trajectories] == [0.5, -1.0, 1.0]
    with pytest.raises(InputError, match=r"groups of \[1, 0, 2\] and advantages of \[1, 0, 1\]"):
        as_trajectories(GROUPS, epoch=0, step=1, advantages=[*advantages[:2], np.zeros(1)])


def rows(step: int, count: int = 2) -> list[Trajectory]:
    return [Trajectory(task_id="q", trial=i, step=step, tokens=np.array([5, step, i], np.int32)) for i in range(count)]


def written(folder: Path, num_steps: int = 5) -> RolloutLog:
    """Write a log with two steps per epoch."""
    log = RolloutLog(folder)
    for step in range(1, num_steps + 1):
        log.write((step - 1) // 2, rows(step))
    return log


def steps_in(folder: Path) -> dict[str, list[int | None]]:
    files = sorted(folder.iterdir())
    return {file.name: [row.step for row in read_trajectories(file)] for file in files}


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


def test_a_new_run_refuses_the_rollouts_of_another_and_keeps_them(tmp_path: Path) -> None:
    written(tmp_path)
    before = steps_in(tmp_path)
    with pytest.raises(StateError, match=r"epoch-000.jsonl; choose another run folder"):
        RolloutLog(tmp_path)
    assert steps_in(tmp_path) == before
