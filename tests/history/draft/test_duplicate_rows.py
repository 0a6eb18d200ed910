"""Duplicate rows are searched once, verified with their leader's draft, and later treated as if searched separately."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.history.reference import Row, draft_rows, drafted, same_drafts, store_of, walk
from treering.errors import InputError
from treering.history.budget import DraftPrices, VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.draft.kernel import BINS, Output, cut
from treering.history.features import NUM_KINDS, NUM_VOTES

FREE = DraftPrices(look=0, row=0, grown=0, learn=0, drafted=0)


TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=4)


def led_and_apart(texts: list[list[int]], **options: Any) -> tuple[Drafter, Drafter]:
    """Return two drafters with equal histories and no other source, so that rows do not see each other."""
    stores = [store_of({"q": {0: texts}}) for _ in range(2)]
    led, apart = (Drafter(store, **{"sources": ("history",), "min_acceptance": 0.001, **options}) for store in stores)
    return led, apart


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=2, max_size=4), st.data())
def test_a_drafter_learns_of_led_rows_what_it_learns_of_rows_apart(
    texts: list[list[int]], ways: list[list[int]], data: st.DataObject
) -> None:
    """Rows take different paths; while they agree, only one of them is looked up."""
    led, apart = led_and_apart(texts)
    num_steps = data.draw(st.integers(1, 3))
    rollouts = [way * 4 for way in ways]
    sizes = [0] * len(ways)
    for _ in range(num_steps):
        rows = [Row(rollout=tuple(rollout[:size])) for rollout, size in zip(rollouts, sizes, strict=True)]
        contexts = [row.context for row in rows]
        leaders = [contexts.index(context) for context in contexts]
        once, each = (draft_rows(rows, row_ids=range(len(rows)), leaders=told) for told in (leaders, None))
        drafts, expected = led.propose(once), apart.propose(each)
        for row, leader in enumerate(leaders):
            assert drafted(drafts)[row] == (drafted(expected)[row] if leader == row else [])
        to_come = [rollout[size:] for rollout, size in zip(rollouts, sizes, strict=True)]
        walks = [walk(expected, b, tokens) for b, tokens in enumerate(to_come)]
        counts, leaves = (np.array(values, np.int64) for values in zip(*walks, strict=True))
        led.observe(once, counts, leaves=leaves)
        apart.observe(each, counts, leaves=leaves)
        sizes = [min(size + count + 1, len(way)) for size, count, way in zip(sizes, counts, rollouts, strict=True)]
    for name, values in apart.state().items():
        if name not in ("num_undrafted", "asked"):
            np.testing.assert_array_equal(led.state()[name], values)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_row_that_leaves_its_leader_is_drafted_as_if_it_never_had_one(is_told: bool) -> None:
    text = [*range(1, 30)]
    led, apart = led_and_apart([text, [1, 2, 77, 11, 12]])
    together = [Row(rollout=tuple(text[:8]))] * 2
    once, each = draft_rows(together, row_ids=[0, 1], leaders=[0, 0]), draft_rows(together, row_ids=[0, 1])
    assert drafted(led.propose(once))[0] == drafted(apart.propose(each))[0]
    if is_told:
        led.observe(once, np.array([1, 1]), leaves=np.array([0, 0]))
        apart.observe(each, np.array([1, 1]), leaves=np.array([0, 0]))
    parted = [Row(rollout=(*text[:9], other)) for other in (10, 77)]
    rows = [draft_rows(parted, row_ids=[0, 1], leaders=leaders) for leaders in ([0, 1], None)]
    drafts = led.propose(rows[0])
    assert min(map(len, drafted(drafts))) > 0
    assert same_drafts(drafts, apart.propose(rows[1]))


def test_a_token_that_more_rows_may_gain_is_drafted_before_one_that_fewer_may() -> None:
    """Four continuations for rows led by another, next to rows that have nothing to draft from."""
    history = {"q": {0: [[1, 2 + k] for k in range(4)]}}
    sizes = []
    for num_led in (0, 1, 3, 7):
        drafter = Drafter(store_of(history), sources=("history",))
        drafter.use_costs(VerifyCosts(num_tokens=np.array([1, 101]), seconds=np.array([1.0, 6.0]), prices=FREE))
        rows = [Row(rollout=(1,))] * (1 + num_led) + [Row(prompt_id=k, group=1 + k) for k in range(7 - num_led)]
        leaders = [0] * (1 + num_led) + [*range(1 + num_led, 8)]
        sizes.append(drafter.propose(draft_rows(rows, leaders=leaders)).tokens.size)
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_gains_of_led_rows_count_relative_to_gains_without_drafts() -> None:
    """Eight rows gain one token each in a step that takes seven times as long, so the drafter rests."""
    drafter = Drafter(store_of({"q": {0: [[1, 2]]}}), sources=("history",))
    prices = DraftPrices(look=5.0, row=0, grown=0, learn=0, drafted=0)
    drafter.use_costs(VerifyCosts(num_tokens=np.array([1, 101]), seconds=np.array([1.0, 91.0]), prices=prices))
    num_drafting = 0
    for _ in range(20):
        rows = draft_rows([Row(rollout=(1,))] * 8, leaders=[0] * 8)
        drafts = drafter.propose(rows)
        if drafts.tokens.size > 0:
            num_drafting += 1
            drafter.observe(rows, np.ones(8, np.int64), leaves=np.zeros(8, np.int64))
    assert 1 <= num_drafting <= 3


@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.floats(0.02, 1.0), max_size=3)), min_size=1, max_size=5),
    st.floats(0.05, 0.9),
)
def test_the_cut_leaves_the_most_tokens_per_second_for_all_rows(
    groups: list[tuple[int, list[float]]], per_token: float
) -> None:
    """Each group is one row with a draft and the rows that it leads."""
    worth, paths, offsets = [], [], [0]
    for num_led, chances in groups:
        worth += [1.0 + num_led, *[0.0] * num_led]
        paths += chances
        offsets += [len(paths)] * (1 + num_led)
    num, num_rows, num_computed = len(paths), len(worth), len(groups)
    gains = np.repeat([1.0 + num_led for num_led, _ in groups], [len(chances) for _, chances in groups]) * paths
    sizes, seconds = np.array([num_computed, num_computed + 100]), np.array([1.0, 1.0 + 100 * per_token])
    output = Output(
        offsets=np.array(offsets, np.int64),
        tokens=np.arange(num, dtype=np.int32),
        parents=np.full(num, -1, np.int32),
        estimates=np.array(paths, np.float32),
        paths=np.array(paths, np.float64),
        shares=np.zeros((num, NUM_VOTES), np.float32),
        features=np.zeros((num, NUM_KINDS), np.int32),
        is_probe=np.zeros(num_rows, np.bool_),
    )
    cut(np.array(worth), output, sizes, seconds, BINS.new())
    stayed = output.tokens[: output.offsets[-1]]

    def speed(tokens: np.ndarray) -> float:
        return float((num_rows + gains[tokens].sum()) / (1.0 + per_token * len(tokens)))

    by_gain = np.argsort(-gains)
    best = max(speed(by_gain[:count]) for count in range(num + 1))
    # Tokens are chosen by bins of probability that are 7 % wide.
    assert speed(stayed) >= best / np.exp(1 / 14) - 1e-12


@pytest.mark.parametrize(
    ("leaders", "row"),
    [([1, 1, 2], 0), ([0, 2, 2], 1), ([0, 0, 1], 2), ([0, -1, 2], 1), ([0, 1, 0], 2), ([0, 1, 7], 2)],
)
def test_an_invalid_leader_is_refused_and_nothing_is_lost(leaders: list[int], row: int) -> None:
    drafter = Drafter(store_of({"q": {0: [[1, 2, 3]]}}))
    rows = [Row(rollout=(1,)), Row(rollout=(1,)), Row(rollout=(1, 2))]
    with pytest.raises(InputError, match=rf"in row {row}; correct the counts, or its leader {leaders[row]}"):
        drafter.propose(draft_rows(rows, leaders=leaders))
    with pytest.raises(InputError, match="in row 2; correct the counts, or its leader 1"):
        drafter.propose(draft_rows([rows[0]] * 3, leaders=[0, 0, 1]))
    assert drafted(drafter.propose(draft_rows(rows, leaders=[0, 0, 2])))[1] == []
