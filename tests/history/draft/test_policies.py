"""Each policy chooses as defined, on histories made by hand."""

from typing import Any

from tests.history.reference import Row, draft_rows, one_draft, store_of
from treering.history.draft.drafter import Drafter

AFTER_ONE = Row(rollout=(1,))


def drafter_of(history: Any, policy: Any, *, shape: Any = "tree") -> Drafter:
    store = store_of({"q": history}, max_epochs=9)
    return Drafter(store, policy=policy, shape=shape, min_acceptance=1e-6, sources=("history",))


def test_frequency_counts_the_longest_matches_alone() -> None:
    drafter = drafter_of({0: [[1, 2, 3]], 1: [[9, 2, 4], [8, 2, 4], [7, 2, 4]]}, "frequency")
    assert one_draft(drafter, Row(rollout=(1, 2))) == [3]
    assert one_draft(drafter, Row(rollout=(6, 2)))[0] == 4


def test_frequency_follows_the_most_votes_at_every_branch() -> None:
    # 2 leads 3 by two to one, after it 5 leads 6 by two to one; 8 comes after the token that is not followed.
    history = {0: [[1, 2, 5, 4], [1, 2, 5, 4], [1, 2, 6, 7], [1, 3, 8, 9]]}
    drafts = drafter_of(history, "frequency").propose(draft_rows([AFTER_ONE]))
    assert drafts.tokens.tolist() == [2, 5, 4]
    assert drafts.parents.tolist() == [-1, 0, 1]
    calibrated = drafter_of(history, "calibrated").propose(draft_rows([AFTER_ONE]))
    assert set(calibrated.tokens.tolist()) == {2, 3, 4, 5, 6, 7, 8, 9}


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
