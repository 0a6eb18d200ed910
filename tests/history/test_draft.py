"""Drafts equal a naive search in plain Python; what is learnt moves estimates; everything is repeatable."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.history.reference import Naive, Row, draft_rows, drafted, one_draft, store_of
from treering.errors import ConfigError, InputError, StateError
from treering.history import match
from treering.history.acceptance import NUM_CELLS
from treering.history.draft import Drafter, DraftRows
from treering.history.store import HistoryStore

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
        max_drafts=st.sampled_from([0, 1, 3, 9]),
    ),
    max_size=5,
)
OPTIONS = st.fixed_dictionaries(
    {
        "max_draft": st.integers(1, 6),
        "max_match": st.sampled_from([1, 2, 3, 16]),
        "min_acceptance": st.sampled_from([1e-9, 0.2, 0.4]),
        "max_live_tokens": st.sampled_from([1, 3, 4096]),
        "sources": st.sampled_from([("history", "siblings", "own"), ("history",), ("siblings",), ("own",)]),
    }
)


def newest_first(history: dict[Any, dict[int, list[list[int]]]]) -> dict[Any, list[list[int]]]:
    return {
        prompt_id: [rollout for version in sorted(versions, reverse=True) for rollout in versions[version] if rollout]
        for prompt_id, versions in history.items()
    }


def random_state(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    num_tried = rng.integers(0, 50, NUM_CELLS).astype(float)
    return {
        "num_tried": num_tried,
        "num_accepted": np.floor(num_tried * rng.random(NUM_CELLS)),
        "num_refused": np.zeros(NUM_CELLS),
    }


def long_history(*rollouts: list[int]) -> HistoryStore:
    return store_of({"q": {0: rollouts}})


def history_drafter(*rollouts: list[int], **options: Any) -> Drafter:
    return Drafter(long_history(*rollouts), **{"sources": ("history",), "min_acceptance": 1e-6, **options})


@given(HISTORY, ROWS, OPTIONS, st.integers(0, 3))
def test_drafts_equal_a_naive_search(
    history: dict[Any, Any], rows: list[Row], options: dict[str, Any], seed: int
) -> None:
    drafter = Drafter(store_of(history), **options)
    drafter.load_state(random_state(seed))
    naive = Naive(history=newest_first(history), state=random_state(seed), **options)
    drafts = drafter.propose(draft_rows(rows))
    expected = [naive.draft(rows, b) for b in range(len(rows))]
    assert drafted(drafts) == [tokens for tokens, _ in expected]
    np.testing.assert_allclose(drafts.acceptance, [a for _, values in expected for a in values], rtol=1e-6)
    assert drafts.parents.tolist() == [i - 1 for tokens, _ in expected for i in range(len(tokens))]
    dtypes = [a.dtype for a in (drafts.tokens, drafts.offsets, drafts.parents, drafts.acceptance)]
    assert dtypes == [np.int32, np.int64, np.int32, np.float32]


def test_long_matches_in_long_texts_equal_a_naive_search() -> None:
    rng = np.random.default_rng(0)
    motif = rng.integers(0, 30, 200)

    def noisy() -> list[int]:
        return np.where(rng.random(200) < 0.05, rng.integers(0, 30, 200), motif).tolist()

    history = {"q": {0: [noisy() for _ in range(4)], 1: [noisy() for _ in range(4)]}}
    rows = [Row(rollout=tuple(noisy()[: rng.integers(0, 200)]), group=b % 2) for b in range(12)]
    drafter = Drafter(store_of(history), min_acceptance=0.05)
    naive = Naive(history=newest_first(history), state=drafter.state(), min_acceptance=0.05)
    drafts = drafted(drafter.propose(draft_rows(rows)))
    assert drafts == [naive.draft(rows, b)[0] for b in range(12)]
    assert max(map(len, drafts)) == 8


def test_the_most_frequent_continuation_wins_and_the_newest_of_equals() -> None:
    row = Row(rollout=(1,))
    assert one_draft(history_drafter([1, 2, 5], [1, 3, 6], [1, 3, 7]), row) == [3, 6]
    assert one_draft(history_drafter([1, 9], [1, 2]), row) == [9]
    newest = store_of({"q": {0: [[1, 2]], 1: [[1, 9]]}})
    assert one_draft(Drafter(newest, min_acceptance=1e-6), row) == [9]


def test_the_most_frequent_continuation_is_found_among_thousands() -> None:
    rng = np.random.default_rng(0)
    for share in (0.02, 0.5):
        tokens = np.where(rng.random(3000) < share, 4321, rng.integers(0, 9999, 3000))
        drafter = history_drafter(*([7, 8, token] for token in tokens.tolist()))
        assert one_draft(drafter, Row(rollout=(8,))) == [4321]


def test_a_longer_match_outweighs_more_occurrences_of_a_shorter_one() -> None:
    drafter = history_drafter([1, 2, 3], [9, 2, 4], [8, 2, 4], [7, 2, 4])
    assert one_draft(drafter, Row(rollout=(1, 2))) == [3]
    assert one_draft(drafter, Row(rollout=(2,))) == [4]


def test_the_marker_stands_for_the_prompt() -> None:
    drafter = history_drafter([4, 5], [5, 6], [4, 7])
    # Where the response begins the earlier beginnings are drafted, at the estimate of the longest match.
    drafts = drafter.propose(draft_rows([Row()]))
    assert drafted(drafts) == [[4, 5]]
    assert drafts.acceptance[0] == pytest.approx(0.55, abs=1e-4)
    # A 5 at the beginning is told from a 5 elsewhere.
    assert one_draft(drafter, Row(rollout=(5,))) == [6]
    # The prompt itself is not looked for in history.
    assert one_draft(drafter, Row(prompt=(5,), rollout=(8,))) == []


def test_no_match_and_no_draft_crosses_into_another_rollout() -> None:
    drafter = history_drafter([1, 2], [3, 4])
    assert one_draft(drafter, Row(rollout=(2, 3))) == [4]  # by 3 alone: 2 and 3 are not neighbours
    assert one_draft(drafter, Row(rollout=(1,))) == [2]
    assert one_draft(drafter, Row(rollout=(1, 2))) == []
    assert one_draft(drafter, Row(rollout=(3, 4))) == []


def test_siblings_are_live_and_scoped_by_group() -> None:
    drafter = Drafter(HistoryStore(), sources=("siblings",), min_acceptance=1e-6)
    ahead, behind = Row(rollout=(1, 2, 3, 4)), Row(rollout=(1, 2))
    assert drafted(drafter.propose(draft_rows([ahead, behind]))) == [[], [3, 4]]
    assert drafted(drafter.propose(draft_rows([ahead, replace(behind, group=1)]))) == [[], []]
    # A fresh row starts as its siblings did.
    assert drafted(drafter.propose(draft_rows([replace(ahead, prompt=(9,)), Row(rollout=())])))[1] == [1, 2, 3, 4]


def test_own_context_reaches_into_the_prompt() -> None:
    drafter = Drafter(HistoryStore(), sources=("own",), min_acceptance=1e-6)
    assert one_draft(drafter, Row(prompt=(7, 8, 9), rollout=(7,))) == [8, 9, 7]
    assert one_draft(drafter, Row(prompt=(7,), rollout=())) == []
    assert one_draft(drafter, Row(prompt=(), rollout=())) == []


def test_a_prompt_is_drafted_from_its_own_history_alone() -> None:
    store = store_of({"a": {0: [[1, 2]]}, "b": {0: [[1, 3]]}, 5: {0: [[1, 4]]}})
    drafter = Drafter(store, min_acceptance=1e-6, sources=("history",))
    rows = [Row(prompt_id=p, rollout=(1,)) for p in ("b", "a", 5, "5", "a")]
    assert drafted(drafter.propose(draft_rows(rows))) == [[3], [2], [4], [], [2]]


def test_a_published_snapshot_is_seen_by_the_next_propose() -> None:
    store = long_history([1, 2])
    drafter = Drafter(store, min_acceptance=1e-6)
    assert one_draft(drafter, Row(rollout=(1,))) == [2]
    store.add("q", [np.array([1, 3], np.int32)] * 2, 1)
    assert one_draft(drafter, Row(rollout=(1,))) == [2]
    store.publish()
    assert one_draft(drafter, Row(rollout=(1,))) == [3]


def test_no_rows_and_no_room_give_no_drafts() -> None:
    drafter = Drafter(long_history([1, 2]))
    empty = draft_rows([])
    assert drafter.propose(empty).offsets.tolist() == [0]
    drafter.observe(empty, np.zeros(0, np.int64))
    assert one_draft(drafter, Row(rollout=(1,), max_drafts=0)) == []


def test_rows_may_be_a_view_of_a_larger_buffer_and_stay_as_they_are() -> None:
    rows = draft_rows([Row(rollout=(1,)), Row(rollout=(1, 2), group=1)])
    buffer = np.full((4, 40), 3, np.int32)
    buffer[:2, : rows.tokens.shape[1]] = rows.tokens
    before = buffer.copy()
    expected = drafted(Drafter(long_history([1, 2, 4])).propose(rows))
    for view in (buffer[:2], buffer[:2, : rows.tokens.shape[1]]):
        assert (
            drafted(Drafter(long_history([1, 2, 4])).propose(replace(rows, tokens=view))) == expected == [[2, 4], [4]]
        )
    np.testing.assert_array_equal(buffer, before)


def test_the_whole_call_runs_without_the_interpreter_lock() -> None:
    assert match.propose.targetoptions["nogil"] is True  # type: ignore[attr-defined]


def test_the_compiled_call_is_named_by_all_sources_that_it_may_use(tmp_path: Any) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "b.py").write_text("y = 1")
    before = match._stamp_of(tmp_path)
    (tmp_path / "a.py").write_text("x = 2")
    assert match._stamp_of(tmp_path) != before
    cells = [cell.cell_contents for cell in match.propose.py_func.__closure__]  # type: ignore[attr-defined]
    assert cells == [match._stamp_of(match.Path(match.__file__).parent)]


def test_drafters_in_two_threads_do_not_disturb_each_other() -> None:
    store = long_history([1, 2, 3, 4], [2, 3, 5, 6])
    rows = draft_rows([Row(rollout=(1, 2)), Row(rollout=(2, 3)), Row(rollout=())])
    results: list[list[list[int]]] = []

    def work() -> None:
        drafter = Drafter(store)
        results.extend(drafted(drafter.propose(rows)) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [results[0]] * 100


def test_the_same_calls_give_the_same_drafts_and_a_state_goes_on_the_same() -> None:
    store = long_history([1, 2, 3, 4, 1, 2, 5], [1, 2, 3, 9])
    rng = np.random.default_rng(0)
    drafters = [Drafter(store, min_acceptance=0.5) for _ in range(2)]
    for step in range(60):
        rows = [Row(rollout=tuple(rng.integers(1, 4, rng.integers(0, 6)))) for _ in range(6)]
        each = [draft_rows(rows) for _ in drafters]
        drafts = [drafter.propose(r) for drafter, r in zip(drafters, each, strict=True)]
        for name in ("tokens", "offsets", "parents", "acceptance", "cells"):
            np.testing.assert_array_equal(getattr(drafts[0], name), getattr(drafts[1], name), strict=True)
        accepted = rng.integers(0, np.diff(drafts[0].offsets) + 1)
        for drafter, r in zip(drafters, each, strict=True):
            drafter.observe(r, accepted)
        if step % 10 == 9:
            resumed = Drafter(store, min_acceptance=0.5)
            resumed.load_state(drafters[1].state())
            drafters[1] = resumed
    assert drafters[0].state()["num_refused"].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_draft": 0}, "max_draft of a drafter is a whole number, at least 1, got 0"),
        ({"max_match": 0}, "max_match of a drafter is a whole number, at least 1, got 0"),
        ({"max_live_tokens": 0}, "max_live_tokens of a drafter is a whole number, at least 1, got 0"),
        ({"max_draft": 2.5}, "max_draft of a drafter is a whole number, at least 1, got 2.5"),
        ({"max_match": 60, "max_draft": 5}, r"at most that, got 60 \+ 5"),
        ({"min_acceptance": 0.0}, r"\(0, 1\], got 0.0"),
        ({"min_acceptance": 1.5}, r"\(0, 1\], got 1.5"),
        ({"sources": ()}, r"at least one, got \(\)"),
        ({"sources": ("histroy",)}, "got .'histroy'"),
    ],
)
def test_a_setting_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Drafter(HistoryStore(), **options)


def test_matches_and_drafts_may_use_all_that_is_sorted() -> None:
    tokens = list(range(100))
    drafter = history_drafter(tokens, tokens, max_match=32, max_draft=32)
    assert one_draft(drafter, Row(rollout=tuple(range(40)), max_drafts=32)) == tokens[40:72]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.zeros((1, 4), np.int64)}, r"int32 of shape \(1, L\), got int64"),
        ({"tokens": np.zeros((2, 4), np.int32)}, r"shape \(1, L\), got int32 of shape \(2, 4\)"),
        ({"tokens": np.zeros(4, np.int32)}, r"got int32 of shape \(4,\)"),
        ({"groups": np.zeros(2, np.int64)}, r"groups is int64 of shape \(1,\).*\(2,\)"),
        ({"max_drafts": np.zeros(1, np.int32)}, r"max_drafts is int64 .* got int32"),
        ({"tokens": [[1, 2]]}, r"tokens of 1 rows .* got list of shape \(1, 2\)"),
        ({"groups": [0]}, r"groups is int64 .* got list of shape \(1,\)"),
        ({"prompt_ids": ["a", "b"]}, r"tokens of 2 rows"),
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
    with pytest.raises(InputError, match="in row 1; correct the counts"):
        Drafter(long_history([1])).propose(rows)


def test_observe_belongs_to_the_latest_propose() -> None:
    drafter = Drafter(long_history([1, 2, 3]))
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
    ("accepted", "ended", "message"),
    [
        (np.array([3]), None, r"got \[3\] of \[2\]"),
        (np.array([-1]), None, r"got \[-1\] of \[2\]"),
        (np.array([1, 1]), None, r"int64 of shape \(2,\)"),
        (np.array([1.0]), None, "got float64"),
        (np.array([1]), np.array([True, False]), r"bool of shape \(2,\)"),
        (np.array([1]), np.array([1]), "int64 of shape"),
    ],
)
def test_a_wrong_observation_is_refused_and_nothing_is_learnt(accepted: Any, ended: Any, message: str) -> None:
    drafter, rows = Drafter(long_history([1, 2, 3], [1, 2, 3])), draft_rows([Row(rollout=(1,))])
    before = drafter.state()
    assert len(drafter.propose(rows).tokens) == 2
    with pytest.raises(InputError, match=message):
        drafter.observe(rows, accepted, ended)
    assert all((drafter.state()[name] == values).all() for name, values in before.items())
    drafter.observe(rows, np.array([1]))
