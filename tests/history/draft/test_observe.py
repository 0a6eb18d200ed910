"""Each propose may be observed once, even if it drafted nothing, and then it teaches nothing."""

import numpy as np
import pytest

from tests.history.reference import Row, draft_rows, same_drafts, store_of, walk
from treering.errors import InputError, StateError
from treering.history.budget.costs import VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.types import DraftRows

ROWS = [Row(rollout=(1,), group=b) for b in range(4)]
MIXED = VerifyCosts(num_tokens=np.array([1, 64]), seconds=np.array([1e-3, 3e-3]))
LOSING = VerifyCosts(num_tokens=np.array([1, 64]), seconds=np.array([1e-6, 2e-6]))


def drafter_of(costs: VerifyCosts | None = LOSING) -> Drafter:
    drafter = Drafter(store_of({"q": {0: [[1, 2, 3, 4]] * 2}}))
    drafter.use_costs(costs)
    return drafter


def resting() -> tuple[Drafter, DraftRows]:
    """A drafter that rests because its drafts gained nothing, and the rows of its latest call."""
    drafter = drafter_of()
    rows = draft_rows(ROWS)
    assert drafter.propose(rows).tokens.size > 0
    drafter.observe(rows, np.zeros(4, np.int64))
    assert drafter.propose(rows).tokens.size == 0
    return drafter, rows


def test_a_step_that_rested_may_be_observed_once() -> None:
    drafter, rows = resting()
    before = drafter.state()
    drafter.observe(rows, np.zeros(4, np.int64), np.zeros(4, np.bool_), np.full(4, -1))
    for name, values in before.items():
        np.testing.assert_array_equal(drafter.state()[name], values, strict=True)
    with pytest.raises(StateError, match="once"):
        drafter.observe(rows, np.zeros(4, np.int64))


@pytest.mark.parametrize("costs", [None, MIXED])
def test_observing_drafts_without_tokens_changes_nothing(costs: VerifyCosts | None) -> None:
    always, seldom = drafter_of(costs), drafter_of(costs)
    rng, num_empty = np.random.default_rng(0), 0
    for step in range(300):
        # Known and unknown contexts, right drafts and later wrong ones: steps draft, find nothing, and rest.
        is_known = rng.random() < 0.7
        rows = draft_rows([Row(rollout=(1 if is_known else 77,), group=b) for b in range(4)])
        drafts = always.propose(rows)
        assert same_drafts(drafts, seldom.propose(rows))
        truth = [2, 3, 4] if step < 200 else [6000]
        counts, leaves = (np.array(v) for v in zip(*(walk(drafts, b, truth) for b in range(4)), strict=True))
        always.observe(rows, counts, None, leaves)
        num_empty += drafts.tokens.size == 0
        if drafts.tokens.size > 0:
            seldom.observe(rows, counts, None, leaves)
    assert 50 < num_empty < 250


def test_drafts_are_forgotten_where_a_later_call_fails() -> None:
    drafter = drafter_of(None)
    rows, wrong = draft_rows([Row(rollout=(1,))]), draft_rows([Row(rollout=(1,), group=b) for b in range(300)])
    assert drafter.propose(rows).tokens.size > 0
    wrong.num_tokens[-1] = -1
    with pytest.raises(InputError, match="row 299"):
        drafter.propose(wrong)
    with pytest.raises(StateError, match="propose first"):
        drafter.observe(rows, np.zeros(1, np.int64))
