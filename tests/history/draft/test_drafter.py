"""Every draft is a tree or a chain that the texts allow, within its limits, the likeliest first."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.history.reference import (
    ALL_SOURCES,
    Allowed,
    Row,
    draft_rows,
    drafted,
    first_tokens,
    simple,
    store_of,
    walk,
)
from treering.history.draft.drafter import Drafter
from treering.history.features import FIRST
from treering.history.types import Drafts

TOKENS = st.integers(0, 2)
ROLLOUT = st.lists(TOKENS, max_size=9)
HISTORY = st.dictionaries(
    st.sampled_from(["a", "b"]),
    st.dictionaries(st.integers(0, 3), st.lists(ROLLOUT, min_size=1, max_size=4), min_size=1, max_size=2),
    max_size=2,
)
ROWS = st.lists(
    st.builds(
        Row,
        prompt_id=st.sampled_from(["a", "b", "unknown"]),
        prompt=st.lists(TOKENS, max_size=3).map(tuple),
        rollout=ROLLOUT.map(tuple),
        group=st.integers(0, 1),
        max_drafts=st.sampled_from([0, 1, 3, 9, 64]),
    ),
    max_size=5,
).map(lambda rows: [replace(row, prompt=rows[row.group % len(rows)].prompt) for row in rows])
"""Rows of a group share their prompt, or nearly so."""
SOURCES = st.sets(st.sampled_from(ALL_SOURCES), min_size=1).map(lambda names: tuple(sorted(names)))


@given(
    HISTORY,
    ROWS,
    SOURCES,
    st.integers(1, 12),
    st.sampled_from([1e-6, 0.08, 0.5]),
    st.sampled_from(["tree", "chain"]),
)
def test_every_draft_is_a_tree_of_continuations_that_a_source_holds(
    history: dict[Any, Any], rows: list[Row], sources: Any, max_draft: int, least: float, shape: Any
) -> None:
    drafter = Drafter(store_of(history), sources=sources, max_draft=max_draft, min_acceptance=least, shape=shape)
    allowed = Allowed(history=history, rows=rows, sources=sources)
    allowed.check(drafter.propose(draft_rows(rows)), max_draft, least, is_chain=shape == "chain")


@settings(max_examples=40)
@given(HISTORY, ROWS, SOURCES, st.sampled_from(["tree", "chain"]), st.integers(0, 2**32))
def test_drafts_stay_allowed_while_rollouts_grow_and_estimates_move(
    history: dict[Any, Any], rows: list[Row], sources: Any, shape: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    drafter = Drafter(store_of(history), sources=sources, min_acceptance=0.01, shape=shape)
    for _ in range(8):
        batch = draft_rows(rows, row_ids=list(range(len(rows))))
        drafts = drafter.propose(batch)
        Allowed(history=history, rows=rows, sources=sources).check(drafts, 40, 0.01, is_chain=shape == "chain")
        truths = [rng.integers(0, 3, 6).tolist() for _ in rows]
        walked = [walk(drafts, b, truth) for b, truth in enumerate(truths)]
        counts, leaves = (np.array(values, np.int64) for values in (zip(*walked, strict=True) if rows else ((), ())))
        drafter.observe(batch, counts, None, leaves)
        rows = [
            replace(row, rollout=(*row.rollout, *truth[: n + 1]))
            for row, truth, n in zip(rows, truths, counts, strict=True)
        ]


def sure(drafter: Drafter) -> Drafter:
    """The same, estimating far higher: only limits end its drafts."""
    state = drafter.state()
    state["weights"][FIRST.any] += 8
    drafter.load_state(state)
    return drafter


def test_long_matches_in_long_texts_are_allowed_and_followed_far() -> None:
    rng = np.random.default_rng(0)
    motif = rng.integers(0, 30, 200)

    def noisy() -> list[int]:
        return np.where(rng.random(200) < 0.05, rng.integers(0, 30, 200), motif).tolist()

    history = {"q": {0: [noisy() for _ in range(4)], 1: [noisy() for _ in range(4)]}, "p": {0: [noisy()]}}
    rows = [Row(rollout=tuple(noisy()[: rng.integers(0, 200)]), group=b % 2) for b in range(12)]
    drafts = sure(Drafter(store_of(history), max_draft=40, min_acceptance=0.02)).propose(draft_rows(rows))
    Allowed(history=history, rows=rows).check(drafts, 40, 0.02, is_chain=False)
    assert max(map(len, drafted(drafts))) == 40


def test_branches_are_drafted_where_rollouts_part() -> None:
    drafts = simple([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3, 4]).propose(draft_rows([Row(rollout=(1,))]))
    assert drafts.tokens.tolist() == [2, 3, 4, 5, 6]
    assert drafts.parents.tolist() == [-1, 0, 1, 0, 3]
    chain = simple([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3, 4], shape="chain").propose(draft_rows([Row(rollout=(1,))]))
    assert chain.tokens.tolist() == [2, 3, 4]
    assert chain.parents.tolist() == [-1, 0, 1]


def test_a_draft_holds_no_more_than_either_limit() -> None:
    rng = np.random.default_rng(0)
    rollouts = [[1, *rng.integers(2, 4, 80)] for _ in range(8)]
    for max_draft, max_drafts, most in ((5, 64, 5), (64, 7, 7), (64, 64, 64), (40, 2**40, 40), (64, 1, 1), (1, 9, 1)):
        drafter = sure(simple(*rollouts, max_draft=max_draft))
        row = Row(rollout=tuple(rollouts[0][:20]), max_drafts=max_drafts)
        drafts = drafter.propose(draft_rows([row, replace(row, max_drafts=0), row]))
        assert [len(tokens) for tokens in drafted(drafts)] == [most, 0, most]


def reached(drafts: Drafts) -> list[float]:
    """What each token of one row is reached and accepted with, likeliest first."""
    chances: list[float] = []
    for parent, value in zip(drafts.parents.tolist(), drafts.acceptance.tolist(), strict=True):
        chances.append(value * (chances[parent] if parent >= 0 else 1.0))
    return sorted(chances, reverse=True)


@pytest.mark.parametrize("least", [0.018, 0.05, 0.1, 0.3])
def test_a_draft_ends_where_the_next_likeliest_token_is_too_unlikely_and_not_before(least: float) -> None:
    rng = np.random.default_rng(3)
    rollouts = [[1, *rng.integers(2, 4, 60)] for _ in range(8)]
    row = draft_rows([Row(rollout=(1,))])
    everything = np.array(reached(simple(*rollouts, min_acceptance=1e-6).propose(row)))
    behind = np.arange(everything.size)
    is_poor = everything < least + 0.0036 * behind * (1 + behind / 32)
    expected = everything[: int(np.argmax([*is_poor, True]))]
    assert 1 < expected.size < everything.size
    np.testing.assert_allclose(reached(simple(*rollouts, min_acceptance=least).propose(row)), expected, rtol=1e-6)


def test_a_source_that_is_left_out_is_not_drafted_from() -> None:
    store = store_of({"q": {0: [[1, 2, 40]]}, "p": {0: [[1, 2, 50]]}})
    rows = [Row(rollout=(1, 2, 60, 1, 2)), Row(rollout=(1, 2, 70))]
    expected = {"history": {40}, "others": {50}, "own": {60}, "siblings": {70}}
    for source, tokens in expected.items():
        drafts = Drafter(store, min_acceptance=1e-6, sources=(source,)).propose(draft_rows(rows))
        assert first_tokens(drafts, 0) == tokens
