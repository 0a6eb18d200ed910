"""How much is drafted: costs of passes, which tokens pay, and when drafting rests."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.history.reference import Allowed, Row, draft_rows, same_drafts, store_of, walk
from treering.errors import InputError
from treering.history.budget import (
    NUM_BINS,
    Backoff,
    DraftPrices,
    PassTimes,
    VerifyCosts,
    bin_of,
    choose_bins,
    non_decreasing,
    seconds_of,
)
from treering.history.draft.drafter import Drafter


@pytest.mark.parametrize(
    ("num_tokens", "seconds", "message"),
    [
        ([], [], r"costs must have .*got shapes \(0,\) and \(0,\)"),
        ([1, 2], [1.0], r"one entry of seconds per entry.*\(2,\) and \(1,\)"),
        ([[1]], [[1.0]], r"got shapes \(1, 1\)"),
        ([0, 2], [1.0, 1.0], r"ascending and >= 1.*got \[0, 2\]"),
        ([2, 2], [1.0, 1.0], "sort and smooth them"),
        ([3, 2], [1.0, 1.0], "sort and smooth them"),
        ([1], [0.0], "seconds > 0"),
        ([1], [-1.0], "seconds > 0"),
        ([1, 2], [2.0, 1.0], r"never falling, got \[1, 2\] and \[2.0, 1.0\]"),
        ([1, 2], [1.0, float("nan")], "never falling"),
        ([1], [float("nan")], "seconds > 0"),
        ([1, 2], [1.0, float("inf")], "finite"),
    ],
)
def test_costs_that_no_pass_can_have_are_refused(num_tokens: Any, seconds: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        VerifyCosts(num_tokens=np.array(num_tokens, np.int64), seconds=np.array(seconds))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"num_tokens": [1.0, 8.0]}, r"num_tokens must be integers .* got \[1.0, 8.0\]"),
        ({"seconds": ["a", "b"]}, "seconds numbers, got"),
        ({"seconds": [[1.0], [1.0, 2.0]]}, r"one number per entry, got \[\[1.0\], \[1.0, 2.0\]\]; flatten it"),
        ({"prices": 1e-6}, "prices of drafting must be a DraftPrices, got 1e-06"),
    ],
)
def test_columns_of_something_else_are_named(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        VerifyCosts(**{"num_tokens": [1, 8], "seconds": [0.1, 0.2], **columns})


def test_lists_are_the_costs_that_arrays_of_them_are() -> None:
    costs = VerifyCosts(num_tokens=[1, 8], seconds=[1, 2.5])  # type: ignore[arg-type]
    assert (costs.num_tokens.dtype, costs.num_tokens.tolist()) == (np.int64, [1, 8])
    assert (costs.seconds.dtype, costs.seconds.tolist()) == (np.float64, [1.0, 2.5])


def test_equal_seconds_and_one_entry_are_costs() -> None:
    for num_tokens, seconds in (([4], [0.1]), ([1, 2, 3], [0.1, 0.1, 0.1])):
        assert VerifyCosts(num_tokens=np.array(num_tokens), seconds=np.array(seconds)).seconds.tolist() == seconds


def test_costs_of_an_engine_that_cannot_be_measured_follow_its_passes() -> None:
    times = PassTimes()
    for size, seconds in ((8, 2.0e-3), (16, 2.8e-3)) * 4:
        times.note(size, seconds)
    curve = times.curve()
    assert curve.num_tokens.tolist() == [8, 16, 32]
    np.testing.assert_allclose(curve.seconds, [2.0e-3, 2.8e-3, 4.4e-3], rtol=1e-12)


def test_costs_are_new_after_one_pass_and_then_ever_less_often() -> None:
    times, found = PassTimes(), []
    assert times.new_costs() is None
    for number in range(1, 140):
        times.note(8, 1e-3)
        if times.new_costs() is not None:
            found.append(number)
    assert found == [1, 17, 34, 68, 136]


def test_costs_never_fall() -> None:
    assert non_decreasing(np.array([1.0, 1.2, 1.0, 1.4])).tolist() == [1.0, 1.1, 1.1, 1.4]
    rng = np.random.default_rng(0)
    for _ in range(50):
        seconds = rng.random(8)
        smooth = non_decreasing(seconds)
        assert (np.diff(smooth) >= 0).all()
        np.testing.assert_array_equal(non_decreasing(np.sort(seconds)), np.sort(seconds))


CURVES = st.lists(
    st.tuples(st.integers(1, 40), st.floats(0.0, 2.0)), min_size=1, max_size=6, unique_by=lambda entry: entry[0]
).map(lambda entries: sorted(entries))


def curve_of(entries: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return sizes and seconds; each entry is a size and the rise of the seconds."""
    return np.array([n for n, _ in entries], np.int64), 0.5 + np.cumsum([rise for _, rise in entries])


def costs_of(num_tokens: list[int], seconds: list[float]) -> VerifyCosts:
    return VerifyCosts(num_tokens=np.array(num_tokens, np.int64), seconds=np.array(seconds))


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 1.0), (2, 1.2), (4.5, 1.7), (8, 2.4), (10, 2.8), (0.5, 1.0), (108, 22.4)]
)
def test_seconds_are_linear_between_entries_and_continue_the_last_slope(num_tokens: float, expected: float) -> None:
    assert seconds_of(num_tokens, np.array([1, 8]), np.array([1.0, 2.4])) == pytest.approx(expected)


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.floats(1e-3, 1.0), st.sampled_from([0.5, 1.0, 3.0])), max_size=20),
    CURVES,
)
def test_the_chosen_bins_give_the_most_tokens_a_second(
    num_rows: int, tokens: list[tuple[float, float]], entries: list[tuple[int, float]]
) -> None:
    sizes, seconds = curve_of(entries)
    counts, gains = np.zeros(NUM_BINS), np.zeros(NUM_BINS)
    for chance, worth in tokens:
        counts[bin_of(min(chance * worth, 1.0))] += 1
        gains[bin_of(min(chance * worth, 1.0))] += chance * worth
    chosen = choose_bins(num_rows, counts, gains, sizes, seconds)

    def speed(num_bins: int) -> float:
        num_tokens = num_rows + counts[:num_bins].sum()
        within = np.interp(num_tokens, sizes, seconds)
        beyond = max(num_tokens - sizes[-1], 0.0)
        slope = 0.0 if sizes.size == 1 else (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        return float((num_rows + gains[:num_bins].sum()) / (within + beyond * slope))

    assert speed(chosen) == pytest.approx(max(speed(num_bins) for num_bins in range(NUM_BINS + 1)))


def history_of(num_prompts: int) -> dict[Any, Any]:
    rng = np.random.default_rng(0)
    return {p: {0: [rng.permutation(5000)[:40].tolist() for _ in range(2)]} for p in range(num_prompts)}


HISTORY = history_of(8)
ROWS = [Row(prompt_id=p, rollout=tuple(HISTORY[p][0][0][: 2 + p]), group=p) for p in range(8)]
FREE = costs_of([1, 1000], [1e-3, 1e-3 + 1e-9])
DEAR = costs_of([1, 1000], [1e-3, 1.0])


def with_costs(costs: VerifyCosts | None, **options: Any) -> Drafter:
    drafter = Drafter(store_of(HISTORY), **options)
    drafter.use_costs(costs)
    return drafter


def test_costlier_tokens_mean_fewer_drafts_and_likelier_tokens_come_first() -> None:
    sizes = []
    for slope in (0.0, 0.02, 0.1, 0.3, 0.6, 2.0):
        drafts = with_costs(costs_of([1, 101], [1.0, 1.0 + 100 * slope])).propose(draft_rows(ROWS))
        Allowed(history=HISTORY, rows=ROWS).check(drafts, 40, 1e-6, is_chain=False)
        chances = chances_of(drafts)
        sizes.append(len(chances))
        if 0 < len(chances) < sizes[0]:
            every = sorted(chances_of(with_costs(FREE).propose(draft_rows(ROWS))), reverse=True)
            # Equal up to the width of the bin at the edge.
            assert min(chances) >= every[len(chances) - 1] * np.exp(-1 / 14) * (1 - 1e-4)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[2] > sizes[-1] == 0


def chances_of(drafts: Any) -> list[float]:
    chances: list[float] = []
    begin = 0
    for i, parent in enumerate(drafts.parents.tolist()):
        if i in drafts.offsets:
            begin = i
        chances.append(float(drafts.acceptance[i]) * (chances[begin + parent] if parent >= 0 else 1.0))
    return chances


def test_without_costs_the_setting_decides_again() -> None:
    drafter = with_costs(DEAR)
    drafter.use_costs(None)
    assert same_drafts(drafter.propose(draft_rows(ROWS)), with_costs(None).propose(draft_rows(ROWS)))


def tries(drafter: Drafter, num_steps: int, *, is_right: bool) -> list[int]:
    """Return the steps that make drafts; all or none of their tokens are accepted."""
    steps = []
    for step in range(num_steps):
        rows = draft_rows(ROWS)
        drafts = drafter.propose(rows)
        if drafts.tokens.size == 0:
            continue
        steps.append(step)
        truths = [HISTORY[p][0][0][2 + p :] if is_right else [6000] for p in range(8)]
        counts, leaves = (np.array(v) for v in zip(*(walk(drafts, b, t) for b, t in enumerate(truths)), strict=True))
        drafter.observe(rows, counts, None, leaves)
    return steps


def test_a_drafter_that_gains_nothing_rests_and_one_that_gains_does_not() -> None:
    costs = costs_of([1, 101], [1e-3, 4e-3])
    assert len(tries(with_costs(costs), 300, is_right=True)) == 300
    assert 1 <= len(tries(with_costs(costs), 300, is_right=False)) < 40


def test_a_resumed_drafter_knows_that_drafts_have_lost() -> None:
    """It looks at once, but if that loses it looks again only after 16 steps, not after 1, 4 and 16."""
    costs = costs_of([1, 101], [1e-3, 4e-3])
    drafter, resumed = with_costs(costs), with_costs(None)
    for num_tries in (2, 1):
        state = drafter.state()
        resumed.load_state(state)
        resumed.use_costs(costs)
        drafter.load_state(state)
        for each in (drafter, resumed):
            # Reset the weights: learning from the losses would soon leave nothing to try.
            each._acceptance.weights[:] = with_costs(costs)._acceptance.weights
            assert tries(each, 6, is_right=False) == [0, 2][:num_tries]


def losing(rest: Backoff, seconds_drafted: float = 2.2e-3) -> int:
    """Return how many steps rest after one that accepts nothing; a step without drafts takes a millisecond."""
    rest.note(8, 40, 0, 1e-3, seconds_drafted)
    num_steps = 0
    while not rest.is_due():
        num_steps += 1
    return num_steps


def test_rests_grow_fourfold_up_to_256_and_end_after_a_gain() -> None:
    rest = Backoff()
    assert rest.is_due()
    assert [losing(rest) for _ in range(8)] == [1, 4, 16, 64, 256, 256, 256, 256]
    num_steps = 0
    while True:
        rest.note(8, 400, 400, 1e-3, 1.5e-3)
        if rest.is_due():
            break
        while not rest.is_due():
            num_steps += 1
    assert num_steps < 64
    for _ in range(30):
        rest.note(8, 400, 400, 1e-3, 1.5e-3)
        assert rest.is_due()
    assert losing(rest) == 0, "one lost step does not outweigh those that gained"


@pytest.mark.parametrize(("num_gains", "length"), [(1, 64), (2, 16), (3, 4), (4, 1)])
def test_a_gain_between_losses_shortens_the_next_rest_to_a_quarter(num_gains: int, length: int) -> None:
    rest = Backoff()
    assert [losing(rest) for _ in range(4)] == [1, 4, 16, 64]
    for _ in range(num_gains):
        # Gain enough to make up for all losses at once.
        rest.note(8, 40, 4000, 1e-3, 1e-3)
        assert rest.is_due()
    # Lose all of it again.
    assert losing(rest, 10.0) == length


@pytest.mark.parametrize(("num_gone", "num_left"), [(0, 16), (5, 11), (16, 0), (28, 0), (64, 0)])
def test_news_shorten_a_rest_to_what_makes_the_loss_two_percent_of_it(num_gone: int, num_left: int) -> None:
    rest = Backoff(DraftPrices(look=330e-6, row=0, grown=0, learn=0, drafted=0))
    assert [losing(rest, 1e-3) for _ in range(3)] == [1, 4, 16]
    # 330 us are half a percent of 66 steps of 1 ms, and two percent of 16.
    rest.note(8, 40, 0, 1e-3, 1e-3)
    assert not any(rest.is_due() for _ in range(num_gone))
    for _ in range(2):
        # Repeated news change nothing more.
        rest.note_news()
    assert [rest.is_due() for _ in range(num_left + 1)] == [False] * num_left + [True]
    assert losing(rest, 1e-3) > 16, "where it loses again, the next rest is as long as it was"


def test_a_drafter_that_rests_looks_soon_where_its_store_publishes() -> None:
    store = store_of(HISTORY)
    drafter, calm = Drafter(store), Drafter(store_of(HISTORY))
    for each in (drafter, calm):
        # Looking takes 0.2 steps: half a percent of 40, and two percent of 10.
        prices = DraftPrices(look=2e-4, row=0, grown=0, learn=0, drafted=0)
        each.use_costs(VerifyCosts(num_tokens=np.array([1]), seconds=np.array([1e-3]), prices=prices))
        tries(each, 30, is_right=False)
    store.add("another", [np.array([1, 2, 3], np.int32)], version=0)
    store.publish()
    assert not all(drafter.is_backing_off() for _ in range(19))
    assert all(calm.is_backing_off() for _ in range(19))
    # News count once: if the look loses, the next rest is as long as any.
    tries(drafter, 1, is_right=False)
    assert all(drafter.is_backing_off() for _ in range(30))


def test_drafts_that_lose_again_are_tried_twice_and_drafts_that_gain_are_made() -> None:
    lengths = np.zeros(2, np.int64)
    for expected in ([1, 4, 16, 64, 256], [16, 64, 256], [16, 64]):
        rest = Backoff(lengths=lengths)
        assert rest.is_due(), "whatever was before"
        assert [losing(rest) for _ in expected] == expected
        assert lengths.tolist() == [expected[-1], 0]
    rest = Backoff(lengths=lengths)
    for length in (1, 0):
        rest.note(8, 400, 400, 1e-3, 1.5e-3)
        assert rest.is_due()
        assert lengths.tolist() == [length, 0]
    for expected in ([1, 4, 16, 64], [16, 64]):
        rest = Backoff(lengths=lengths)
        for length in expected:
            rest.note_nothing(8, 1e-6)
            assert [rest.is_due() for _ in range(length + 1)] == [False] * length + [True]
    assert lengths.tolist() == [0, 64]


@pytest.mark.parametrize(
    ("seconds_drafted", "lengths"),
    # 250 us are half a percent of 50 steps of 1 ms, 20 us of 4, and 1 us of less than one; a rest has at least one
    # step.
    [(1.25e-3, [1, 4, 16, 50, 50]), (1.02e-3, [1, 4, 4, 4]), (1.001e-3, [1, 1, 1])],
)
def test_a_loss_is_half_a_percent_of_the_rest_after_it(seconds_drafted: float, lengths: list[int]) -> None:
    rest = Backoff(DraftPrices(look=0, row=0, grown=0, learn=0, drafted=0))
    assert [losing(rest, seconds_drafted + 1e-9) for _ in lengths] == lengths


@pytest.mark.parametrize(
    ("seconds", "lengths"),
    # 50 us and 5 us per row, here 90 us, are half a percent of 30 steps of 0.6 ms, 4.5 of 4 ms and 0.9 of 20 ms.
    [
        (0.6e-3 - 1e-9, [1, 4, 16, 30, 30]),
        (4e-3, [1, 4, 4, 4]),
        (20e-3, [0, 0]),
        (1e-6, [1, 4, 16, 64, 256, 256]),
    ],
)
def test_where_nothing_is_found_looking_takes_half_a_percent(seconds: float, lengths: list[int]) -> None:
    rest = Backoff()
    for length in lengths:
        rest.note_nothing(8, seconds)
        assert [rest.is_due() for _ in range(length + 1)] == [False] * length + [True]
    rest.note(8, 400, 400, 1e-3, 1.5e-3)
    assert rest.is_due()
    rest.note_nothing(8, seconds)
    assert [rest.is_due() for _ in range(2)] == [lengths[0] == 0, True]
