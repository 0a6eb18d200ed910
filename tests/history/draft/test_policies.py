"""Each policy's choice is the one that its definition says, on histories made by hand."""

from typing import Any

import pytest

from tests.history.reference import Row, draft_rows, first_tokens, one_draft, store_of
from treering.history.draft.drafter import Drafter

BEHIND_ONE = Row(rollout=(1,))


def drafter_of(history: Any, policy: Any, *, shape: Any = "tree", rewards: Any = None) -> Drafter:
    store = store_of({"q": history}, rewards={"q": rewards or {}}, max_epochs=9)
    return Drafter(store, policy=policy, shape=shape, min_acceptance=1e-6, sources=("history",))


@pytest.mark.parametrize("shape", ["tree", "chain"])
@pytest.mark.parametrize(
    ("policy", "expected"),
    # Token 2 stands behind 1 most often, 3 with the greatest reward, 4 most often in the newest version.
    [("frequency", 2), ("reward", 3), ("recency", 4)],
)
def test_policies_part_where_their_definitions_do(policy: str, shape: str, expected: int) -> None:
    history = {0: [[1, 2], [1, 2], [1, 2]], 1: [[1, 3], [1, 4], [1, 4]]}
    rewards = {0: [0.0, 0.0, 0.0], 1: [1.0, 0.0, 0.0]}
    drafter = drafter_of(history, policy, shape=shape, rewards=rewards)
    assert one_draft(drafter, BEHIND_ONE)[0] == expected


def test_frequency_counts_each_place_alike_whatever_its_age_and_reward() -> None:
    drafter = drafter_of({0: [[1, 2], [1, 2]], 5: [[1, 3]]}, "frequency", rewards={0: [0, 0], 5: [9.0]})
    drafts = drafter.propose(draft_rows([BEHIND_ONE]))
    assert drafts.tokens.tolist() == [2]


def test_reward_adds_up_the_rewards_of_the_rollouts_that_agree() -> None:
    for rewards, expected in (([0.5, 0.5, 0.9], 2), ([0.1, 0.1, 0.9], 3), ([-5.0, -5.0, 0.1], 3)):
        drafter = drafter_of({0: [[1, 2], [1, 2], [1, 3]]}, "reward", rewards={0: rewards})
        assert one_draft(drafter, BEHIND_ONE)[0] == expected


def test_without_rewards_the_reward_policy_counts_places() -> None:
    drafter = drafter_of({0: [[1, 2], [1, 3], [1, 3]]}, "reward")
    assert one_draft(drafter, BEHIND_ONE)[0] == 3


def test_one_place_of_a_newer_version_outweighs_two_of_an_older_one() -> None:
    assert one_draft(drafter_of({3: [[1, 2]] * 2, 4: [[1, 9]]}, "recency"), BEHIND_ONE)[0] == 9
    assert one_draft(drafter_of({0: [[1, 2]] * 2, 1: [[1, 9]], 2: [[5, 6]]}, "recency"), BEHIND_ONE)[0] == 9
    assert one_draft(drafter_of({3: [[1, 2]] * 2, 4: [[1, 9]]}, "frequency"), BEHIND_ONE)[0] == 2


@pytest.mark.parametrize("policy", ["frequency", "reward", "recency"])
def test_of_the_longest_matches_alone(policy: str) -> None:
    history = {0: [[1, 2, 3]], 1: [[9, 2, 4], [8, 2, 4], [7, 2, 4]]}
    drafter = drafter_of(history, policy, rewards={0: [0.1], 1: [1.0, 1.0, 1.0]})
    assert one_draft(drafter, Row(rollout=(1, 2))) == [3]
    assert one_draft(drafter, Row(rollout=(6, 2)))[0] == 4


def test_calibrated_prefers_the_longer_match_and_keeps_the_others_as_branches() -> None:
    drafter = drafter_of({0: [[1, 2, 3], [9, 2, 4], [8, 2, 4], [7, 2, 4]]}, "calibrated")
    drafts = drafter.propose(draft_rows([Row(rollout=(1, 2))]))
    assert drafts.tokens.tolist() == [3, 4]
    assert drafts.parents.tolist() == [-1, -1]
    assert drafts.acceptance[0] > 2 * drafts.acceptance[1]


def test_calibrated_is_surer_of_longer_matches_of_more_rollouts_that_agree() -> None:
    def estimate(history: Any, rollout: tuple[int, ...]) -> float:
        return float(drafter_of({0: history}, "calibrated").propose(draft_rows([Row(rollout=rollout)])).acceptance[0])

    longer = [estimate([[7, *range(20), 50]], (8, *range(20 - n, 20))) for n in (1, 3, 12)]
    assert longer == sorted(longer)
    assert longer[0] < 0.5 < longer[-1]
    # Each rollout agrees in one token with the row.
    more = [estimate([[20 + k, 1, 2] for k in range(n)], (8, 1)) for n in (1, 2, 8)]
    assert more == sorted(more)
    split = estimate([[20, 1, 2], [21, 1, 2], [22, 1, 3], [23, 1, 4]], (8, 1))
    assert split < more[1]


@pytest.mark.parametrize("policy", ["frequency", "reward", "recency"])
def test_other_policies_follow_the_most_votes_at_every_branch(policy: str) -> None:
    # 2 leads 3 by two to one, behind it 5 leads 6 by two to one; 8 stands behind the token that is not followed.
    history = {0: [[1, 2, 5, 4], [1, 2, 5, 4], [1, 2, 6, 7], [1, 3, 8, 9]]}
    drafter = drafter_of(history, policy, rewards={0: [1.0, 1.0, 1.0, 1.0]})
    drafts = drafter.propose(draft_rows([BEHIND_ONE]))
    assert drafts.tokens.tolist() == [2, 5, 4]
    assert drafts.parents.tolist() == [-1, 0, 1]
    calibrated = drafter_of(history, "calibrated").propose(draft_rows([BEHIND_ONE]))
    assert set(calibrated.tokens.tolist()) == {2, 3, 4, 5, 6, 7, 8, 9}


@pytest.mark.parametrize("policy", ["frequency", "reward", "recency"])
def test_equal_votes_are_branches_of_a_tree_and_one_of_them_is_a_chain(policy: str) -> None:
    for shape, num_branches in (("tree", 2), ("chain", 1)):
        drafter = drafter_of({0: [[1, 2, 5], [1, 3, 6], [1, 2, 5], [1, 3, 6], [1, 4, 7]]}, policy, shape=shape)
        first = first_tokens(drafter.propose(draft_rows([BEHIND_ONE])))
        assert first <= {2, 3}
        assert len(first) == num_branches


def test_a_reward_below_zero_counts_as_none() -> None:
    for rewards, expected in (([-9.0, 0.1], {3}), ([-9.0, -1.0], {2, 3}), ([0.0, -1.0], {2, 3})):
        drafter = drafter_of({0: [[1, 2], [1, 3]]}, "reward", rewards={0: rewards})
        assert first_tokens(drafter.propose(draft_rows([BEHIND_ONE]))) == expected


def test_one_rollout_of_the_newest_version_outweighs_any_number_of_older_ones() -> None:
    for older in ({3: [[1, 2]] * 40}, {v: [[1, 2]] * 9 for v in range(8)}):
        drafter = drafter_of({**older, 9: [[1, 9]]}, "recency")
        assert first_tokens(drafter.propose(draft_rows([BEHIND_ONE]))) == {9}
