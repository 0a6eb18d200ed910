"""The time of drafting counts: finding, drafting and learning have prices, and a drafter that loses time backs off."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.history.reference import Row, draft_rows, same_drafts, store_of, walk
from treering.errors import InputError
from treering.history.budget import controller as spending
from treering.history.budget.controller import DraftController, step_costs
from treering.history.budget.costs import DraftPrices, VerifyCosts
from treering.history.budget.selection import Backoff
from treering.history.draft.drafter import Drafter
from treering.history.types import Drafts

FREE = DraftPrices(look=0, row=0, grown=0, learn=0, drafted=0)
SIZES, SECONDS = [1, 101], [1.0, 11.0]
PRICES = st.builds(DraftPrices, **{name: st.floats(0, 2) for name in ("look", "row", "grown", "learn", "drafted")})


def costs_of(prices: DraftPrices, sizes: list[int] = SIZES, seconds: list[float] = SECONDS) -> VerifyCosts:
    return VerifyCosts(num_tokens=np.array(sizes, np.int64), seconds=np.array(seconds), prices=prices)


def texts_of(prompt: int) -> list[list[int]]:
    """Rollouts of a prompt that part from the first one here and there."""
    rng = np.random.default_rng(prompt)
    text = rng.permutation(5000)[:40]
    return [np.where(rng.random(40) < 0.15 * k, rng.integers(0, 5000, 40), text).tolist() for k in range(4)]


HISTORY = {prompt: {0: texts_of(prompt)} for prompt in range(8)}
ROWS = [Row(prompt_id=p, rollout=tuple(HISTORY[p][0][0][: 2 + p]), group=p) for p in range(8)]


def drafter_of(costs: VerifyCosts | None, **options: Any) -> Drafter:
    drafter = Drafter(store_of(HISTORY), **options)
    drafter.use_costs(costs)
    return drafter


def num_drafting(costs: VerifyCosts, num_steps: int) -> int:
    """Steps with drafts, all of which come true."""
    drafter, count = drafter_of(costs), 0
    for _ in range(num_steps):
        rows = draft_rows(ROWS)
        drafts = drafter.propose(rows)
        if drafts.tokens.size == 0:
            continue
        count += 1
        walks = [walk(drafts, p, HISTORY[p][0][0][2 + p :]) for p in range(8)]
        counts, leaves = (np.array(values) for values in zip(*walks, strict=True))
        drafter.observe(rows, counts, None, leaves)
    return count


def test_a_drafter_whose_price_exceeds_its_gain_rests_however_right_it_is() -> None:
    assert num_drafting(costs_of(FREE), 100) == 100
    # A step without drafts takes 1.7 s and gains 8 tokens; with them it gains 328 at most, in a hundred such steps.
    for name in ("look", "row", "grown", "learn"):
        assert 1 <= num_drafting(costs_of(DraftPrices(**{name: 200.0})), 100) < 20, name


@pytest.mark.parametrize("name", ["grown", "drafted"])
def test_the_dearer_a_token_is_the_fewer_are_drafted(name: str) -> None:
    prices = [DraftPrices(**{**dict.fromkeys(DraftPrices.__slots__, 0.0), name: p}) for p in (0, 0.01, 0.05, 0.1, 1)]
    sizes = [drafter_of(costs_of(price)).propose(draft_rows(ROWS)).tokens.size for price in prices]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


def gain_of(drafts: Drafts) -> float:
    """Expected tokens of a step with these drafts."""
    gain = float(len(ROWS))
    for b in range(len(ROWS)):
        chances: list[float] = []
        for i in range(int(drafts.offsets[b]), int(drafts.offsets[b + 1])):
            before = chances[drafts.parents[i]] if drafts.parents[i] >= 0 else 1.0
            chances.append(float(drafts.acceptance[i]) * before)
        gain += sum(chances)
    return gain


@settings(deadline=None)
@given(st.floats(0, 0.5), st.floats(0, 0.3))
def test_what_is_not_looked_at_would_not_have_made_a_step_faster(slope: float, drafted: float) -> None:
    prices = DraftPrices(look=0.1, row=0.01, grown=0.0, learn=0.0, drafted=drafted)
    costs = costs_of(prices, [1, 9, 400], [1, 1.01, 1.01 + 391 * slope])
    rows = draft_rows(ROWS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftController, "leasts", (1e-9, 0.0))
        every = drafter_of(costs).propose(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spending, "_LEAST_WITH_COSTS", 0.0)
        patch.setattr(spending, "_FIRST_CUTOFF", 0.0)
        found = drafter_of(costs).propose(rows)

    def speed(drafts: Drafts) -> float:
        num_tokens = drafts.tokens.size
        seconds = np.interp(8 + num_tokens, costs.num_tokens, costs.seconds) + 0.1 + 0.08 + drafted * num_tokens
        return gain_of(drafts) / float(seconds)

    assert speed(found) >= speed(every) * (1 - 1e-5)


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 20), st.floats(0.0, 2.0)), min_size=1, max_size=6),
    PRICES,
    st.integers(0, 30),
)
def test_a_steps_costs_are_its_pass_and_the_price_of_each_drafted_token(
    num_rows: int, rises: list[tuple[int, float]], prices: DraftPrices, num_more: int
) -> None:
    sizes = np.cumsum([more for more, _ in rises])
    seconds = 0.5 + np.cumsum([rise for _, rise in rises])
    found = step_costs(VerifyCosts(num_tokens=sizes, seconds=seconds, prices=prices), num_rows)

    def line(xs: np.ndarray, ys: np.ndarray, x: float) -> float:
        slope = 0.0 if xs.size == 1 else (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
        return float(np.interp(x, xs, ys) + max(x - xs[-1], 0) * slope)

    at = num_rows + num_more
    expected = line(sizes, seconds, at) + prices.drafted * num_more
    assert line(found.sizes, found.seconds, at) == pytest.approx(expected)
    one_more = line(found.sizes, found.seconds, at + 1) - line(found.sizes, found.seconds, at)
    assert one_more >= found.per_token - 1e-9


def test_resting_counts_what_was_found_and_not_only_what_was_drafted() -> None:
    # Looking 1 s, a token found 0.5 s, learning 2 s, a drafted token 0.25 s: 1 + 15 + 2 + 5 s for 30 found, 20 drafted.
    prices = DraftPrices(look=1.0, row=0.0, grown=0.5, learn=2.0, drafted=0.25)
    for num_grown, is_due in ((30, True), (31, False)):
        rest = Backoff(prices)
        # 8 tokens in 40 s, or 16 in 80 s: the pass with drafts takes 57 of these.
        rest.note(8, 20, 8, 40.0, 57.0, num_grown)
        assert rest.is_due() == is_due


def test_asking_first_whether_a_step_rests_changes_no_draft() -> None:
    losing = costs_of(DraftPrices(learn=200.0))
    asked, unasked = drafter_of(losing), drafter_of(losing)
    rested = []
    for _ in range(40):
        rows = draft_rows(ROWS)
        expected = unasked.propose(rows)
        rested.append(asked.is_backing_off())
        if rested[-1]:
            assert expected.tokens.size == 0
            continue
        assert same_drafts(asked.propose(rows), expected)
        for drafter in (asked, unasked):
            drafter.observe(rows, np.zeros(8, np.int64))
    assert 0 < sum(rested) < 40
    assert not Drafter(store_of({})).is_backing_off()


@pytest.mark.parametrize("name", ["look", "row", "grown", "learn", "drafted"])
@pytest.mark.parametrize("price", [-1e-6, float("nan"), float("inf")])
def test_prices_that_are_none_are_refused(name: str, price: float) -> None:
    with pytest.raises(InputError, match=r"finite and 0 or more, got .*correct them"):
        DraftPrices(**{name: price})
