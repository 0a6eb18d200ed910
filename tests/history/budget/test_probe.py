"""Tokens that seem too unlikely to draft are probed now and then, or their estimates would never improve."""

import numpy as np
import pytest

from tests.history.reference import Row, draft_rows, drafted, store_of, walk
from treering.history.budget.costs import VerifyCosts
from treering.history.draft.acceptance import OFFSET
from treering.history.draft.drafter import Drafter
from treering.history.draft.kernel import ROWS_PER_PROBE
from treering.history.features import FIRST

KNOWN, UNKNOWN = Row(rollout=(1,)), Row(rollout=(77,))
CHEAP = VerifyCosts(num_tokens=np.array([1, 1000]), seconds=np.array([1.0, 1.001]))


def hopeless_drafter(*, has_costs: bool = False) -> Drafter:
    """Its places look as if one in 100,000 tokens were accepted."""
    drafter = Drafter(store_of({"q": {0: [[1, 2, 3, 4]] * 2}}), min_acceptance=0.1)
    if has_costs:
        drafter.use_costs(CHEAP)
    state = drafter.state()
    state["weights"][FIRST.any] -= 30
    drafter.load_state(state)
    return drafter


def sizes_of(drafter: Drafter, rows: list[Row], num_steps: int) -> list[int]:
    """Drafted tokens of every row, step after step."""
    return [len(tokens) for _ in range(num_steps) for tokens in drafted(drafter.propose(draft_rows(rows)))]


@pytest.mark.parametrize("num_rows", [1, 7, 64, 150])
def test_one_row_of_65_that_have_places_and_no_draft_gets_a_token(num_rows: int) -> None:
    sizes = sizes_of(hopeless_drafter(), [KNOWN] * num_rows, 1 + 500 // num_rows)
    expected = ([0] * ROWS_PER_PROBE + [1]) * len(sizes)
    assert sizes == expected[: len(sizes)]
    assert sum(sizes) >= 5


def test_the_token_is_the_likeliest_and_its_estimate_is_as_low_as_it_was() -> None:
    drafter = hopeless_drafter()
    drafts = [drafter.propose(draft_rows([KNOWN])) for _ in range(ROWS_PER_PROBE + 1)][-1]
    assert drafts.tokens.tolist() == [2]
    assert drafts.parents.tolist() == [-1]
    assert 0 < drafts.acceptance[0] < 1e-4


@pytest.mark.parametrize("rare_first", [True, False])
def test_of_several_tokens_the_likeliest_is_tried_in_whatever_order_they_are_found(rare_first: bool) -> None:
    often, rare = [[1, 2, 3, 4]] * 2, [[1, 9, 4]]
    drafter = Drafter(store_of({"q": {0: rare + often if rare_first else often + rare}}), min_acceptance=0.1)
    state = drafter.state()
    state["weights"][OFFSET] -= 12
    drafter.load_state(state)
    assert sizes_of(drafter, [KNOWN], ROWS_PER_PROBE) == [0] * ROWS_PER_PROBE
    assert drafter.propose(draft_rows([KNOWN])).tokens.tolist() == [2]


def test_rows_without_places_do_not_count_and_get_nothing() -> None:
    drafter = hopeless_drafter()
    assert sum(sizes_of(drafter, [KNOWN], 10)) == 0
    assert sum(sizes_of(drafter, [UNKNOWN], 300)) == 0
    assert sizes_of(drafter, [KNOWN], ROWS_PER_PROBE - 10) == [0] * (ROWS_PER_PROBE - 10)
    assert sum(sizes_of(drafter, [UNKNOWN], 300)) == 0
    assert sizes_of(drafter, [KNOWN], 2) == [1, 0]


def test_a_source_that_was_given_up_is_drafted_from_again_once_it_comes_true() -> None:
    texts = {p: np.random.default_rng(p).permutation(5000)[:12].tolist() for p in range(8)}
    drafter = Drafter(
        store_of({p: {0: [text]} for p, text in texts.items()}), min_acceptance=0.25, sources=("history",)
    )

    def num_drafted(step: int, *, is_right: bool) -> int:
        text = texts[step % 8]
        rows = draft_rows([Row(prompt_id=step % 8, rollout=tuple(text[:3]))])
        drafts = drafter.propose(rows)
        accepted, leaf = walk(drafts, 0, text[3:] if is_right else [6000])
        drafter.observe(rows, np.array([accepted]), None, np.array([leaf]))
        return int(drafts.tokens.size)

    failing = [num_drafted(step, is_right=False) for step in range(600)]
    assert failing[0] > 3
    # Given up: of 65 rows one gets one token.
    assert sum(failing[-130:]) == 2
    working = [num_drafted(step, is_right=True) for step in range(3000)]
    assert np.mean(working[-50:]) > 3


FLAT = VerifyCosts(num_tokens=np.array([1, 1000]), seconds=np.array([1.0, 1.001]))


def test_tokens_that_pay_are_drafted_again_behind_steps_that_found_no_place() -> None:
    drafter = Drafter(store_of({"q": {0: [[1, 2, 3, 4]] * 2}}))
    drafter.use_costs(FLAT)
    state = drafter.state()
    state["weights"][FIRST.any] -= 4
    drafter.load_state(state)
    known, unknown = (draft_rows([Row(rollout=(token,))]) for token in (1, 77))
    before = drafter.propose(known)
    assert 0.02 < before.acceptance[0] < 0.45
    for _ in range(30):
        assert drafter.propose(unknown).tokens.size == 0
    sizes = [drafter.propose(known).tokens.size for _ in range(20)]
    assert min(sizes) >= before.tokens.size
