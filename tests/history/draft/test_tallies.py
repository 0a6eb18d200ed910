"""What is learnt of so many places out of so many holds for just these numbers, and for tokens of any text."""

import numpy as np
import pytest

from tests.history.reference import Row, draft_rows, store_of
from treering.history.draft.drafter import Drafter
from treering.history.features import (
    FIRST,
    NUM_GENERAL,
    NUM_GENERAL_KINDS,
    NUM_STATES,
    NUM_VOTES,
    fine_share,
    rivals,
    tally,
)

BEHIND_SEVEN = draft_rows([Row(rollout=(7,))])
TALLY, LONGEST, RIVALS, FINE_SHARE = FIRST[14:18]


def first_estimates(history: list[list[int]], taught: int | None, context: tuple[int, ...]) -> dict[int, float]:
    """Estimates of the tokens that may come next, once something is learnt of one feature."""
    drafter = Drafter(store_of({"q": {0: history}}), min_acceptance=1e-6, sources=("history",))
    if taught is not None:
        state = drafter.state()
        state["weights"][NUM_VOTES + taught] += 3.0
        drafter.load_state(state)
    drafts = drafter.propose(draft_rows([Row(rollout=context)]))
    firsts = drafts.parents == -1
    return dict(zip(drafts.tokens[firsts].tolist(), drafts.acceptance[firsts].tolist(), strict=True))


def estimates(continuations: list[int], taught: int | None = None) -> dict[int, float]:
    """The same of the tokens that rollouts go on with behind a 7."""
    return first_estimates([[7, token, 50 + k] for k, token in enumerate(continuations)], taught, (7,))


@pytest.mark.parametrize(
    "taught",
    [
        TALLY + tally(2, 3) * (NUM_STATES + 1),
        LONGEST + tally(2, 3),
        RIVALS + rivals(2, 2),
    ],
)
def test_two_of_three_places_are_told_from_one_of_three_and_from_two_of_four(taught: int) -> None:
    before, after = estimates([30, 30, 31]), estimates([30, 30, 31], taught)
    assert after[30] > before[30] + 0.1
    assert after[31] == before[31]
    others = [30, 30, 31, 32]
    assert estimates(others, taught) == estimates(others)
    # Which tokens they are says nothing.
    assert estimates([90, 90, 31], taught)[90] > estimates([90, 90, 31])[90] + 0.1


def test_places_of_a_token_are_told_from_the_number_of_candidates_and_from_all_places() -> None:
    plain = estimates([30, 30, 31, 32])
    assert estimates([30, 30, 31, 32], RIVALS + rivals(2, 3))[30] > plain[30] + 0.1
    assert estimates([30, 30, 31, 32], RIVALS + rivals(3, 2)) == plain
    for num_places, is_taught in ((4, True), (2, False)):
        found = [estimates([30, 30, 31, 32], FINE_SHARE + fine_share(share, num_places)) for share in range(20)]
        assert any(each[30] > plain[30] + 0.1 for each in found) == is_taught


def test_of_places_of_which_two_agree_longer_the_two_are_counted_beside_those_of_the_longest_match() -> None:
    history = [[1, 7, 30, 50], [1, 7, 30, 51], [1, 7, 31, 52], [2, 7, 31, 53]]
    plain = first_estimates(history, None, (1, 7))
    # Of 31's two places one is among the three whose match is the longest.
    for taught, token, other in ((tally(2, 3), 30, 31), (tally(1, 3), 31, 30)):
        found = first_estimates(history, LONGEST + taught, (1, 7))
        assert found[token] > plain[token] + 0.1
        assert found[other] == plain[other]
    assert first_estimates(history, LONGEST + tally(2, 4), (1, 7)) == plain


def test_behind_a_token_of_shorter_matches_the_longest_are_the_longest_of_its_own() -> None:
    drafter = Drafter(
        store_of({"q": {0: [[1, 7, 30, 40]] * 3 + [[2, 7, 31, 41]]}}), min_acceptance=1e-6, sources=("history",)
    )
    rows = draft_rows([Row(rollout=(1, 7))])
    plain = drafter.propose(rows)
    state = drafter.state()
    state["weights"][NUM_VOTES + LONGEST + tally(1, 1)] += 3.0
    drafter.load_state(state)
    taught = drafter.propose(rows)
    before = dict(zip(plain.tokens.tolist(), plain.acceptance.tolist(), strict=True))
    after = dict(zip(taught.tokens.tolist(), taught.acceptance.tolist(), strict=True))
    assert after.pop(41) > before.pop(41) + 0.05
    assert after == before


def test_behind_a_drafted_token_a_tally_says_something_else() -> None:
    drafter = Drafter(store_of({"q": {0: [[7, 30, 31]] * 2}}), min_acceptance=1e-6, sources=("history",))
    plain = drafter.propose(BEHIND_SEVEN).acceptance
    state = drafter.state()
    state["weights"][NUM_VOTES + TALLY + tally(2, 2) * (NUM_STATES + 1) + NUM_STATES] += 3.0
    drafter.load_state(state)
    first, second = drafter.propose(BEHIND_SEVEN).acceptance.tolist()
    assert first == plain[0]
    assert second > plain[1] + 0.05


def test_numbers_are_exact_up_to_twelve_of_twenty_and_of_one_kind_beyond() -> None:
    pairs = [(count, places) for places in range(21) for count in range(min(places, 12) + 1)]
    assert len({tally(count, places) for count, places in pairs}) == len(pairs)
    assert tally(13, 40) == tally(12, 20) == 12 * 21 + 20
    assert len({rivals(count, num) for count in range(13) for num in range(13)}) == 13 * 13
    assert rivals(99, 99) == 13 * 13 - 1
    assert len({fine_share(share, places) for share in range(20) for places in range(21)}) == 420
    assert fine_share(19, 21) == 419
    # Every number stands within its kind.
    assert tally(12, 20) * (NUM_STATES + 1) + NUM_STATES == LONGEST - TALLY - 1
    assert (tally(12, 20), rivals(12, 12), fine_share(19, 20)) == (
        RIVALS - LONGEST - 1, FINE_SHARE - RIVALS - 1, NUM_GENERAL - FINE_SHARE - 1,
    )  # fmt: skip
    assert np.all(np.diff(FIRST[:NUM_GENERAL_KINDS]) > 0)
    assert np.all(np.diff(FIRST[NUM_GENERAL_KINDS:]) > 0)
