"""The drafter chooses tokens by the cost of passes and drafting, and still probes tokens that look unlikely."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.history.reference import Row, draft_rows, drafted, first_tokens, likeliest_path, same_drafts, store_of, walk
from treering.errors import InputError
from treering.history import budget as spending
from treering.history.budget import Backoff, DraftController, DraftPrices, VerifyCosts, step_costs
from treering.history.draft.acceptance import OFFSET
from treering.history.draft.drafter import Drafter
from treering.history.draft.kernel import BINS, ROWS_PER_PROBE, Output, cut
from treering.history.draft_types import DraftRows, Drafts
from treering.history.features import FIRST, NO_DRAFT, NUM_KINDS, NUM_SOURCES, NUM_VOTES

# A pass takes 1 s for one token and 0.1 s for each further token.
SIZES, SECONDS = np.array([1, 101]), np.array([1.0, 11.0])
DEAR = VerifyCosts(num_tokens=np.array([1, 1000]), seconds=np.array([1.0, 1000.0]))


def cut_row(paths: list[float], *, probes: list[float] | None = None) -> tuple[float, list[int]]:
    """Cut one row of independent tokens, plus one probing row per probe; return the cutoff and the kept indices."""
    chances = np.array([*paths, *(probes or [])])
    num = chances.size
    num_rows = 1 + len(probes or [])
    output = Output(
        offsets=np.array([0, *range(len(paths), num + 1)], np.int64),
        tokens=np.arange(num, dtype=np.int32),
        parents=np.full(num, -1, np.int32),
        estimates=chances.astype(np.float32),
        paths=chances,
        shares=np.zeros((num, NUM_VOTES), np.float32),
        features=np.zeros((num, NUM_KINDS), np.int32),
        is_probe=np.array([False] + [True] * (num_rows - 1)),
    )
    cutoff = cut(np.ones(num_rows), output, SIZES, SECONDS, BINS.new())
    return cutoff, output.tokens[: output.offsets[-1]].tolist()


@pytest.mark.parametrize(
    ("paths", "probes", "cutoff", "stay"),
    [
        # (1 + 0.9) / 1.1 tokens per second beat 1 and (1 + 0.95) / 1.2.
        ([0.9, 0.05], [], 0.9, [0]),
        ([0.05, 0.9, 0.8], [], 0.8, [1, 2]),
        # If every token pays or none does, there is no cutoff to learn.
        ([0.9], [], 0.0, [0]),
        ([0.05], [], 0.0, []),
        # With two rows, 3.89 / 1.3 beats 2 / 1.1, 2.99 / 1.2 and 3.94 / 1.4.
        ([0.9, 0.05], [0.99], 0.9, [0, 2]),
        ([0.9], [0.99], 0.0, [0, 1]),
        ([0.05], [0.99], 0.0, [1]),
        ([0.9], [0.01], 0.0, [0]),
    ],
)
def test_a_cutoff_is_the_least_that_stayed_where_something_went(
    paths: list[float], probes: list[float], cutoff: float, stay: list[int]
) -> None:
    assert cut_row(paths, probes=probes) == (cutoff, stay)


def test_uncertain_tokens_that_pay_are_drafted_after_many_certain_ones() -> None:
    history = {"sure": {0: [[1, 2]] * 8}, "mixed": {0: [[1, 2 + k] for k in range(4)]}}
    drafter = Drafter(store_of(history), sources=("history",))
    drafter.use_costs(CHEAP)
    sure = Row(prompt_id="sure", rollout=(1,), max_drafts=1)
    for _ in range(60):
        rows = draft_rows([sure] * 3)
        drafts = drafter.propose(rows)
        assert drafted(drafts) == [[2]] * 3
        drafter.observe(rows, np.ones(3, np.int64))
    fresh = Drafter(store_of(history), sources=("history",))
    fresh.load_state(drafter.state())
    fresh.use_costs(CHEAP)
    rows = draft_rows([Row(prompt_id="mixed", rollout=(1,), group=1), replace(sure, group=2)])
    drafts = drafter.propose(rows)
    assert same_drafts(drafts, fresh.propose(rows))
    assert first_tokens(drafts) == {2, 3, 4, 5}


def test_a_row_whose_tokens_were_all_cut_counts_as_having_had_no_draft() -> None:
    history = {p: {0: [np.arange(first, first + 30).tolist()] * 4} for p, first in (("sure", 100), ("poor", 200))}
    drafter = Drafter(store_of(history), sources=("history",))
    drafter.use_costs(VerifyCosts(num_tokens=SIZES, seconds=SECONDS))
    state = drafter.state()
    state["weights"][FIRST.token + np.arange(200, 230)] = -8.0
    state["weights"][FIRST.outcome + NO_DRAFT * NUM_SOURCES] = 40.0
    drafter.load_state(state)

    def rows(num_sure: int, num_poor: int) -> DraftRows:
        sure = Row(prompt_id="sure", rollout=tuple(range(100, 100 + num_sure)), group=0)
        poor = Row(prompt_id="poor", rollout=tuple(range(200, 200 + num_poor)), group=1)
        return draft_rows([sure, poor], row_ids=[0, 1])

    first = rows(5, 5)
    drafts = drafter.propose(first)
    assert [len(tokens) > 0 for tokens in drafted(drafts)] == [True, False]
    accepted, leaf = walk(drafts, 0, range(105, 130))
    drafter.observe(first, np.array([accepted, 0]), None, np.array([leaf, -1]))
    # The changed weight favours the first token of a row that had no draft at the previous step.
    assert likeliest_path(drafter.propose(rows(5 + accepted + 1, 6)), 1)[:1] == [206]


def test_a_probe_that_did_not_pay_is_still_due() -> None:
    drafter = hopeless_drafter()
    rows = draft_rows([KNOWN])
    for _ in range(ROWS_PER_PROBE):
        assert drafter.propose(rows).tokens.size == 0
    # A drafted token costs as much as a step, so even a certain one does not pay.
    drafter.use_costs(DEAR)
    assert drafter.propose(rows).tokens.size == 0
    drafter.use_costs(CHEAP)
    assert drafter.propose(rows).tokens.tolist() == [2]
    drafter.use_costs(None)
    assert [drafter.propose(rows).tokens.size for _ in range(ROWS_PER_PROBE + 1)] == [0] * ROWS_PER_PROBE + [1]


def test_the_search_threshold_follows_the_cutoff_up_and_down() -> None:
    spending = DraftController(0.4)
    assert spending.leasts[0] == 0.4
    spending.use_costs(CHEAP)
    leasts = []
    for cutoff in (0.9, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9):
        spending.note_drafts(1, 1, cutoff, 1)
        leasts.append(spending.leasts[0])
    # The threshold is half of a mean that starts at 0.1 and moves half way to each cutoff: half of 0.5, 0.7 and so on,
    # but at least 0.02.
    assert leasts == pytest.approx([0.25, 0.35, 0.175, 0.0875, 0.04375, 0.021875, 0.02, 0.5 * (0.021875 / 2 + 0.45)])


KNOWN, UNKNOWN = Row(rollout=(1,)), Row(rollout=(77,))
CHEAP = VerifyCosts(num_tokens=np.array([1, 1000]), seconds=np.array([1.0, 1.001]))


def hopeless_drafter(*, has_costs: bool = False) -> Drafter:
    """Return a drafter that estimates its matches at about one accepted token in 100,000."""
    drafter = Drafter(store_of({"q": {0: [[1, 2, 3, 4]] * 2}}), min_acceptance=0.1)
    if has_costs:
        drafter.use_costs(CHEAP)
    state = drafter.state()
    state["weights"][FIRST.any] -= 30
    drafter.load_state(state)
    return drafter


def sizes_of(drafter: Drafter, rows: list[Row], num_steps: int) -> list[int]:
    """Return the number of drafted tokens of every row, step by step."""
    return [len(tokens) for _ in range(num_steps) for tokens in drafted(drafter.propose(draft_rows(rows)))]


@pytest.mark.parametrize("num_rows", [1, 7, 64, 150])
def test_one_row_of_65_that_have_matches_and_no_draft_gets_a_token(num_rows: int) -> None:
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
def test_the_likeliest_of_several_tokens_is_tried_in_any_order(rare_first: bool) -> None:
    often, rare = [[1, 2, 3, 4]] * 2, [[1, 9, 4]]
    drafter = Drafter(store_of({"q": {0: rare + often if rare_first else often + rare}}), min_acceptance=0.1)
    state = drafter.state()
    state["weights"][OFFSET] -= 12
    drafter.load_state(state)
    assert sizes_of(drafter, [KNOWN], ROWS_PER_PROBE) == [0] * ROWS_PER_PROBE
    assert drafter.propose(draft_rows([KNOWN])).tokens.tolist() == [2]


def test_rows_without_matches_do_not_count_and_get_nothing() -> None:
    drafter = hopeless_drafter()
    assert sum(sizes_of(drafter, [KNOWN], 10)) == 0
    assert sum(sizes_of(drafter, [UNKNOWN], 300)) == 0
    assert sizes_of(drafter, [KNOWN], ROWS_PER_PROBE - 10) == [0] * (ROWS_PER_PROBE - 10)
    assert sum(sizes_of(drafter, [UNKNOWN], 300)) == 0
    assert sizes_of(drafter, [KNOWN], 2) == [1, 0]


def test_a_token_that_is_tried_is_verified_where_drafts_have_a_price() -> None:
    # A drafter with costs rests between two looks and then verifies only the probed token.
    sizes = sizes_of(hopeless_drafter(has_costs=True), [KNOWN] * 5, 400)
    assert set(sizes) == {0, 1}


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
    # The source is given up: only one of 65 rows gets a token.
    assert sum(failing[-130:]) == 2
    working = [num_drafted(step, is_right=True) for step in range(3000)]
    assert np.mean(working[-50:]) > 3


FLAT = VerifyCosts(num_tokens=np.array([1, 1000]), seconds=np.array([1.0, 1.001]))


def test_tokens_that_pay_are_drafted_again_after_steps_without_matches() -> None:
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


FREE = DraftPrices(look=0, row=0, grown=0, learn=0, drafted=0)
PRICED_SIZES, PRICED_SECONDS = [1, 101], [1.0, 11.0]
PRICES = st.builds(DraftPrices, **{name: st.floats(0, 2) for name in ("look", "row", "grown", "learn", "drafted")})


def costs_of(
    prices: DraftPrices, sizes: list[int] = PRICED_SIZES, seconds: list[float] = PRICED_SECONDS
) -> VerifyCosts:
    return VerifyCosts(num_tokens=np.array(sizes, np.int64), seconds=np.array(seconds), prices=prices)


def texts_of(prompt: int) -> list[list[int]]:
    """Return rollouts of a prompt that increasingly differ from the first one."""
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
    """Return the number of steps with drafts when every draft is right."""
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


def test_a_drafter_that_costs_more_than_it_gains_rests_even_if_right() -> None:
    assert num_drafting(costs_of(FREE), 100) == 100
    # A step without drafts takes 1.7 s and gains 8 tokens. With drafts it gains at most 328 and takes more than a
    # hundred times as long.
    for name in ("look", "row", "grown", "learn"):
        assert 1 <= num_drafting(costs_of(DraftPrices(**{name: 200.0})), 100) < 20, name


@pytest.mark.parametrize("name", ["grown", "drafted"])
def test_costlier_tokens_mean_fewer_drafts(name: str) -> None:
    prices = [DraftPrices(**{**dict.fromkeys(DraftPrices.__slots__, 0.0), name: p}) for p in (0, 0.01, 0.05, 0.1, 1)]
    sizes = [drafter_of(costs_of(price)).propose(draft_rows(ROWS)).tokens.size for price in prices]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


def gain_of(drafts: Drafts) -> float:
    """Return the expected number of tokens of a step with these drafts."""
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
def test_skipped_tokens_would_not_have_made_a_step_faster(slope: float, drafted: float) -> None:
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
    # For 30 found and 20 drafted tokens: 1 s to look, 15 s for the found ones, 2 s to learn, 5 s for the drafted ones.
    prices = DraftPrices(look=1.0, row=0.0, grown=0.5, learn=2.0, drafted=0.25)
    for num_grown, is_due in ((30, True), (31, False)):
        rest = Backoff(prices)
        # Without drafts 8 tokens take 40 s, so 16 take 80 s. The pass with drafts takes 57 s of these and drafting 23
        # s.
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
    with pytest.raises(InputError, match=r"finite and >= 0, got .*correct them"):
        DraftPrices(**{name: price})
