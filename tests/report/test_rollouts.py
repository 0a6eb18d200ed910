"""Drawing of the newest rollouts: every token once, with its branches, and the source that drafted it."""

from pathlib import Path

import numpy as np
import pytest

from tests.report.folders import CONFIG, group, rollout, write_run
from treering.data import Trajectory, write_trajectories
from treering.data.trajectory import CallSpan, EpisodePart, Turn
from treering.report.content import MAX_DRAWN_EPISODES, bounds_of, draw, episodes_of, token_origins, trained_groups
from treering.report.rollout_views import MAX_DRAWN_TOKENS, choose_prompts, read_newest
from treering.tree.forest import Forest
from treering.types import ModelShape

SHAPE = ModelShape(
    name="tiny", num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_size=4, intermediate_size=8,
    vocab_size=64, num_experts=1, num_active_experts=1,
)  # fmt: skip


@pytest.mark.parametrize(
    "tokens",
    [
        [[1, 2, 10, 11, 12, 13, 20, 21, 22], [1, 2, 10, 11, 12, 13, 30, 31], [1, 2, 40, 41, 42, 43, 44]],
        # A branch that ends right after the subtree of another one, equal branches and a prefix of others.
        [[1, 2, 3], [1, 4], [1, 2, 5], [1, 4], [1], [1, 2]],
        # Two trees.
        [[1, 2], [3, 4], [1, 5], [3]],
    ],
)
def test_a_drawing_covers_each_token_of_each_rollout_once(tokens: list[list[int]]) -> None:
    rollouts = [rollout("a", 0, each) for each in tokens]
    drawing = draw(rollouts)
    longest = max(map(len, tokens))
    covered = np.zeros((len(tokens), longest), int)
    for start, num_tokens, top, bottom, _ in drawing["segments"]:
        covered[top:bottom, start : start + num_tokens] += 1
    for index, number in enumerate(drawing["rows"]):
        size = len(tokens[number])
        assert covered[index].tolist() == [1] * size + [0] * (longest - size)
    prefixes = {tuple(each[:end]) for each in tokens for end in range(1, len(each) + 1)}
    assert sum(segment[1] for segment in drawing["segments"]) == drawing["num_tokens"] == len(prefixes)
    assert sorted(drawing["rows"]) == list(range(len(tokens)))


def test_a_segment_has_the_mean_advantage_of_its_branches() -> None:
    first, second, third = group("a", 0)
    # Rows are in another order than rollouts.
    drawing = draw([first, third, second])
    assert drawing["rows"] == [0, 2, 1]
    found = {(start, num_tokens): advantage for start, num_tokens, _, _, advantage in drawing["segments"]}
    assert found == {(0, 2): 0.0, (2, 4): 0.625, (6, 3): 1.25, (6, 2): 0.0, (2, 5): -1.25}


def test_the_bounds_are_those_of_the_trained_groups() -> None:
    alike = [rollout("c", 0, [1, 2, 3, 4], reward=1.0, advantage=0.0) for _ in range(4)]
    found = bounds_of(trained_groups([*group("a", 0), *alike]), SHAPE)
    assert found["token_bound"] == pytest.approx((9 + 8 + 7) / 16)
    assert 1.0 < found["flop_bound"] < found["token_bound"]


def test_repeated_rollouts_come_from_history(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=6)
    epochs = read_newest(tmp_path, 3).epochs
    found = token_origins(epochs, ["a", "b"], CONFIG)
    for prompt in ("a", "b"):
        assert [letters[:2] for letters in found[prompt]] == ["gg"] * 3
        assert [len(letters) for letters in found[prompt]] == [9, 8, 7]
        assert sum(letters.count("h") for letters in found[prompt]) > 9


def test_first_rollouts_of_a_run_alone_are_sampled() -> None:
    alone = {0: [rollout("a", 0, [1, 2, 3, 4, 5, 6, 7])]}
    assert token_origins(alone, ["a"], CONFIG) == {"a": ["ggnnnnn"]}


def test_a_rollout_that_repeats_itself_drafts_from_its_own_context() -> None:
    alone = {0: [rollout("a", 0, [1, 2, *[3, 4, 5, 6, 7, 8] * 12])]}
    letters = token_origins(alone, ["a"], CONFIG)["a"][0]
    assert letters[:8] == "ggnnnnnn"
    assert set(letters[20:]) == {"n", "o"}


def test_the_newest_epoch_has_the_largest_number(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    for epoch in (998, 999, 1000):
        write_trajectories(tmp_path / "rollouts" / f"epoch-{epoch:03d}.jsonl", group("a", epoch))
    assert list(read_newest(tmp_path, 2).epochs) == [999, 1000]


def test_prompts_are_drawn_until_the_page_is_full() -> None:
    long = {str(i): [rollout(str(i), 0, list(range(MAX_DRAWN_TOKENS // 3)))] for i in range(5)}
    assert choose_prompts(long) == ["0", "1", "2"]
    assert len(choose_prompts({"a": [rollout("a", 0, list(range(MAX_DRAWN_TOKENS + 9)))]})) == 1


def test_prompts_whose_rewards_differ_are_drawn_first() -> None:
    alike: list[Trajectory] = [rollout("c", 0, [1, 2, 3], reward=1.0) for _ in range(4)]
    assert choose_prompts({"c": alike, "a": group("a", 0)}) == ["a", "c"]


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
