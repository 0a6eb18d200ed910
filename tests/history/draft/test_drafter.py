"""Drafts are trees of continuations found in a source; the drafter refuses rows that it cannot draft for."""

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
from treering.errors import ConfigError, InputError, StateError
from treering.history.draft.drafter import Drafter
from treering.history.draft_types import DraftRows, Drafts
from treering.history.features import FIRST, SOURCES
from treering.history.store.store import HistoryStore

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
"""Rows of a group mostly share their prompt."""
SOME_SOURCES = st.sets(st.sampled_from(ALL_SOURCES), min_size=1).map(lambda names: tuple(sorted(names)))


@given(
    HISTORY,
    ROWS,
    SOME_SOURCES,
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
@given(HISTORY, ROWS, SOME_SOURCES, st.sampled_from(["tree", "chain"]), st.integers(0, 2**32))
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
    """Raise the drafter's estimates so that only limits end its drafts."""
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
    """Return the probability of accepting each token's whole path, highest first."""
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


LINE, FORK = [[1, 2, 3]], [[1, 2, 3], [1, 4]]


def drafter_of(rollouts: list[list[int]]) -> Drafter:
    return Drafter(store_of({"q": {0: rollouts}}), min_acceptance=1e-6, sources=("history",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_draft": 0}, "max_draft of a drafter must be an integer from 1 to 64, got 0; correct it"),
        ({"max_live_tokens": 15}, "max_live_tokens of a drafter must be an integer from 16 .* got 15"),
        ({"max_other_tokens": -1}, "max_other_tokens of a drafter must be an integer from 0 .* got -1"),
        ({"min_acceptance": 0.0}, r"min_acceptance must be a probability in \(0, 1\], got 0.0"),
        ({"min_acceptance": "0.1"}, r"in \(0, 1\], got '0.1'"),
        ({"shape": "bush"}, "shape must be one of tree, chain, got 'bush'; choose one"),
        ({"sources": ("histroy",)}, "got .'histroy'"),
    ],
)
def test_a_setting_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Drafter(HistoryStore(), **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.zeros((1, 4), np.int64)}, r"int32 of shape \(1, L\), got int64"),
        ({"tokens": np.zeros(4, np.int32)}, r"got int32 of shape \(4,\)"),
        ({"groups": np.zeros(2, np.int64)}, r"groups must be int64 of shape \(1,\).*\(2,\)"),
        ({"max_drafts": np.zeros(1, np.int32)}, r"max_drafts must be int64 .* got int32"),
        ({"row_ids": [7]}, r"row_ids must be int64 .* got list .* convert it"),
        ({"tokens": [[1]]}, r"int32 of shape \(1, L\), got list"),
        ({"prompt_ids": [["a"]]}, r"prompt_ids must be strings or integers, got \[\['a'\]\]; convert them"),
    ],
)
def test_rows_of_other_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(draft_rows([Row()]), **changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_tokens", 6), ("num_tokens", 1), ("num_prompt_tokens", -1), ("num_prompt_tokens", 3), ("max_drafts", -1)],
)
def test_counts_that_contradict_are_refused_before_anything_is_read(name: str, value: int) -> None:
    rows: DraftRows = draft_rows([Row(), Row()], num_spare=3)
    getattr(rows, name)[1] = value
    drafter = drafter_of(LINE)
    with pytest.raises(InputError, match="in row 1; correct the counts"):
        drafter.propose(rows)
    assert drafter.propose(draft_rows([Row(rollout=(1,))])).tokens.tolist() == [2, 3]


def test_observe_belongs_to_the_latest_propose() -> None:
    drafter = drafter_of(LINE)
    first, second = (draft_rows([Row(rollout=(1,))]) for _ in range(2))
    none = np.zeros(1, np.int64)
    with pytest.raises(StateError, match="propose first"):
        drafter.observe(first, none)
    drafter.propose(first)
    drafter.propose(second)
    with pytest.raises(StateError, match="the latest propose"):
        drafter.observe(first, none)
    drafter.observe(second, none)
    with pytest.raises(StateError, match="once"):
        drafter.observe(second, none)


@pytest.mark.parametrize(
    ("accepted", "ended", "leaves", "message"),
    [
        (np.array([4]), None, None, r"got \[4\] of \[3\]; count drafted tokens only"),
        (np.array([1, 1]), None, None, r"all of shape \(1,\), got int64 of shape \(2,\)"),
        (np.array([1.0]), None, None, "got float64"),
        (np.array([1]), np.array([True, False]), None, r"bool of shape \(2,\)"),
        (np.array([1]), None, np.array([0, 0]), r"int64 of shape \(2,\)"),
        # Tokens 0 and 1 form the path 2, 3; token 2 is the branch 4.
        (np.array([1]), None, np.array([1]), r"as deep as the row's accepted tokens.*got \[1\] for \[1\] of \[3\]"),
        (np.array([0]), None, np.array([0]), r"got \[0\] for \[0\]"),
        (np.array([1]), None, np.array([-2]), r"got \[-2\] for \[1\]"),
    ],
)
def test_a_wrong_observation_is_refused_and_nothing_is_learnt(
    accepted: Any, ended: Any, leaves: Any, message: str
) -> None:
    drafter, rows = drafter_of(FORK), draft_rows([Row(rollout=(1,))])
    before = drafter.state()
    assert drafter.propose(rows).parents.tolist() == [-1, 0, -1]
    with pytest.raises(InputError, match=message):
        drafter.observe(rows, accepted, ended, leaves)
    assert all((drafter.state()[name] == values).all() for name, values in before.items())
    drafter.observe(rows, np.array([1]), None, np.array([0]))
    assert (drafter.state()["weights"] != before["weights"]).any()


TEXT = tuple(range(100, 130))


def sources_of(drafter: Drafter, *rows: Row) -> list[set[str]]:
    drafts = drafter.propose(draft_rows(rows))
    found = np.array(SOURCES)[drafter.sources_of_latest()]
    return [set(found[begin:end].tolist()) for begin, end in zip(drafts.offsets, drafts.offsets[1:], strict=False)]


def row(rollout: tuple[int, ...], prompt_id: str, group: int = 0) -> Row:
    return Row(prompt=(1, 2), rollout=rollout, prompt_id=prompt_id, group=group, max_drafts=8)


def test_each_source_is_named_where_it_alone_has_the_text() -> None:
    store = HistoryStore()
    store.add("a", [np.array(TEXT, np.int32)], version=0)
    store.publish()
    assert sources_of(Drafter(store), row(TEXT[:8], "a")) == [{"history"}]
    assert sources_of(Drafter(store), row(TEXT[:8], "b")) == [{"others"}]
    assert sources_of(Drafter(HistoryStore()), row(TEXT[:12] + TEXT[:6], "a")) == [{"own"}]
    leader, follower = sources_of(Drafter(HistoryStore()), row(TEXT, "a"), row(TEXT[:8], "a"))
    assert (leader, follower) == (set(), {"siblings"})


def test_without_drafts_to_observe_there_are_no_sources() -> None:
    drafter = Drafter(HistoryStore())
    with pytest.raises(StateError, match=r"there are no drafts .*; call propose first"):
        drafter.sources_of_latest()
    rows = draft_rows([row(TEXT[:8], "a")])
    assert drafter.propose(rows).tokens.size == drafter.sources_of_latest().size
