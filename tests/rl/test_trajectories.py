"""Groups as trajectory records."""

from pathlib import Path

import numpy as np
import pytest

from tests.rl.rollouts import prompt_of, rollout_of
from treering.data import read_trajectories, write_trajectories
from treering.errors import InputError
from treering.rl.collect import Group
from treering.rl.rollout_log import as_trajectories

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


def test_advantages_stand_beside_their_rollouts() -> None:
    advantages = [np.array([0.5]), np.zeros(0), np.array([-1.0, 1.0])]
    trajectories = as_trajectories(GROUPS, epoch=0, step=1, advantages=advantages)
    assert [t.advantage for t in trajectories] == [0.5, -1.0, 1.0]
    with pytest.raises(InputError, match=r"groups of \[1, 0, 2\], advantages of \[1, 0, 1\]"):
        as_trajectories(GROUPS, epoch=0, step=1, advantages=[*advantages[:2], np.zeros(1)])


def test_trajectories_survive_a_file(tmp_path: Path) -> None:
    trajectories = as_trajectories(GROUPS, epoch=0, step=1)
    write_trajectories(tmp_path / "epoch.jsonl", trajectories)
    back = read_trajectories(tmp_path / "epoch.jsonl")
    for one, other in zip(trajectories, back, strict=True):
        for name in one.__slots__:
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
