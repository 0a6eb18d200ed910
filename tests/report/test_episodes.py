"""The tree of an episode: every token of every branch is in one bar, and each call's tokens are its agent's."""

import numpy as np

from treering.data import Trajectory
from treering.data.trajectory import CallSpan, EpisodePart, Turn
from treering.report.content import MAX_DRAWN_EPISODES, episodes_of
from treering.tree.forest import Forest


def branch(tokens: list[int], agent: str, calls: list[tuple[int, int, int]], **given: object) -> Trajectory:
    mask = np.zeros(len(tokens), bool)
    for _, start, stop in calls:
        mask[start:stop] = True
    part = EpisodePart(agent=agent, calls=tuple(CallSpan(*call) for call in calls), turns=given.pop("turns", ()))
    fields = {"task_id": "t", "trial": 0, "step": 3, "epoch": 1, "reward": 0.5, **given}
    return Trajectory(tokens=np.array(tokens, np.int32), loss_mask=mask, episode=part, **fields)


EPISODE = [
    # Two turns of one chat, a branch after the first turn, and another agent's call.
    branch([1, 2, 10, 11, 3, 12], "a", [(0, 2, 4), (1, 5, 6)], turns=(Turn(3, 0.5), Turn(3, 0.0))),
    branch([1, 2, 10, 11, 4, 13, 14], "a", [(2, 5, 7)]),
    branch([9, 20], "b", [(0, 1, 2)], reward=0.25),
]


def test_each_token_of_each_branch_is_in_one_bar_of_its_kind() -> None:
    [drawn] = episodes_of(EPISODE, None)
    depth = max(each.tokens.size for each in EPISODE if each.tokens is not None)
    covered = np.full((3, depth), -2)
    for start, length, top, bottom, agent, _, _ in drawn["spans"]:
        assert (covered[top:bottom, start : start + length] == -2).all()
        covered[top:bottom, start : start + length] = agent
    # The page draws branches that share as neighbours; here they are in the given order.
    assert covered.tolist() == [[-1, -1, 0, 0, -1, 0, -2], [-1, -1, 0, 0, -1, 0, 0], [-1, 1, -2, -2, -2, -2, -2]]
    assert [(drawn["agents"][agent], reward) for agent, reward, _ in drawn["rows"]] == [
        ("a", 0.5),
        ("a", 0.5),
        ("b", 0.25),
    ]
    forest = Forest.from_sequences([each.tokens for each in EPISODE if each.tokens is not None])
    assert (drawn["num_tokens"], drawn["num_branch_tokens"]) == (forest.num_tokens, forest.num_branch_tokens)
    assert (drawn["num_calls"], drawn["wait_s"], drawn["step"]) == (4, 0.5, 3)


def test_each_of_several_consecutive_calls_is_a_bar_with_its_text() -> None:
    [drawn] = episodes_of([branch([1, 5, 6, 7], "a", [(0, 1, 3), (1, 3, 4)])], lambda token: f"<{token}>")
    assert [(span[4], span[5], span[6]) for span in drawn["spans"]] == [
        (-1, -1, "<1>"),
        (0, 0, "<5><6>"),
        (0, 1, "<7>"),
    ]


def test_only_episodes_of_the_newest_step_are_drawn_and_not_too_many() -> None:
    earlier = [branch([1, 2], "a", [(0, 1, 2)], step=2)]
    many = [branch([1, 2], "a", [(0, 1, 2)], trial=trial) for trial in range(MAX_DRAWN_EPISODES + 5)]
    plain = [Trajectory(task_id="p", tokens=np.array([1, 2], np.int32), step=9, epoch=1)]
    drawn = episodes_of([*earlier, *many, *plain], None)
    assert len(drawn) == MAX_DRAWN_EPISODES
    assert {each["step"] for each in drawn} == {3}
    assert episodes_of(plain, None) == []
    huge = [branch(list(range(1, 30_001)), "a", [(0, 1, 2)], trial=trial) for trial in range(3)]
    assert len(episodes_of(huge, None)) == 1
