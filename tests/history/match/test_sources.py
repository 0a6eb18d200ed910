"""Each step searches the right sources and finds the right matches in each."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.history.reference import Allowed, Row, draft_rows, drafted, first_tokens, likeliest_path, store_of, walk
from treering.history.budget import VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.features import FIRST, NUM_KINDS, NUM_LENGTHS, NUM_SOURCES, OTHERS, Source
from treering.history.match.published import MAX_QUERIES
from treering.history.match.sources import SourceGate
from treering.history.store.store import HistoryStore

TOKENS = st.integers(0, 3)
ROLLOUTS = st.lists(st.lists(TOKENS, max_size=30), min_size=1, max_size=4)
ROWS = st.tuples(
    st.integers(0, 3),  # the last prompt has no history
    st.lists(TOKENS, max_size=20),
    st.sampled_from([0, 64, 64, 64]),
)


@settings(max_examples=100, deadline=None)
@given(
    histories=st.lists(ROLLOUTS, min_size=3, max_size=3),
    parts=st.lists(ROWS, min_size=2, max_size=2 * MAX_QUERIES + 1),
    others=st.booleans(),
)
def test_rows_together_get_the_drafts_of_separate_rows(
    histories: list[list[list[int]]], parts: list[tuple[int, list[int], int]], others: bool
) -> None:
    store = store_of({prompt: {0: rollouts} for prompt, rollouts in enumerate(histories)})
    # Put all rows in one group, so that none is another group's running rollout to the others.
    rows = [Row(prompt_id=prompt, rollout=tuple(tokens), max_drafts=most) for prompt, tokens, most in parts]

    def propose(some: list[Row]) -> tuple[list[list[int]], np.ndarray]:
        drafter = Drafter(store, min_acceptance=1e-6, sources=("history", "others") if others else ("history",))
        drafts = drafter.propose(draft_rows(some))
        return drafted(drafts), drafts.acceptance

    together, acceptance = propose(rows)
    alone = [propose([row]) for row in rows]
    assert together == [tokens for (tokens,), _ in alone]
    assert acceptance.tolist() == np.concatenate([estimates for _, estimates in alone]).tolist()


OLD = np.random.default_rng(0).permutation(900)[:40].tolist()
NEW = 5000
"""Token that the old trajectory does not contain."""

EDITS = {
    "replaced": ((*OLD[:10], NEW), 11),
    "added": ((*OLD[:10], NEW), 10),
    "left out": (tuple(OLD[:10]), 11),
}
"""Rollout just after each edit, and the index at which the old trajectory continues."""


def stepped(rollout: tuple[int, ...], store: Any, **options: Any) -> Any:
    """Draft for a row whose rollout grew token by token."""
    drafter = Drafter(store, **options)
    for length in range(1, len(rollout)):
        drafter.propose(draft_rows([Row(rollout=rollout[:length])], row_ids=[0]))
    return drafter.propose(draft_rows([Row(rollout=rollout)], row_ids=[0]))


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("num_rollouts", [1, 3])
def test_one_token_after_an_edit_the_old_trajectory_continues(edit: str, num_rollouts: int) -> None:
    rollout, at = EDITS[edit]
    store = store_of({"q": {0: [OLD] * num_rollouts}})
    rollout = (*rollout, OLD[at])
    for drafts in (stepped(rollout, store), Drafter(store).propose(draft_rows([Row(rollout=rollout)]))):
        path = likeliest_path(drafts)
        assert len(path) >= 4
        assert path == OLD[at + 1 : at + 1 + len(path)]


@pytest.mark.parametrize("edit", EDITS)
def test_the_aligned_match_wins_over_more_matches_of_the_same_token(edit: str) -> None:
    rollout, at = EDITS[edit]
    # The token after the edit occurs in six more matches, each with another continuation.
    elsewhere = [[1000 + k, 1100 + k, OLD[at], 1200 + k, 1300 + k] for k in range(6)]
    store = store_of({"q": {0: [*elsewhere[:3], OLD, *elsewhere[3:]]}})
    rollout = (*rollout, OLD[at])
    for drafts in (stepped(rollout, store), Drafter(store).propose(draft_rows([Row(rollout=rollout)]))):
        assert likeliest_path(drafts)[:3] == OLD[at + 1 : at + 4]
        assert 1200 not in likeliest_path(drafts)


def test_the_edit_may_stand_anywhere() -> None:
    store = store_of({"q": {0: [OLD]}})
    for at in range(4, 30):
        for rollout in ((*OLD[:at], NEW, OLD[at + 1]), (*OLD[: at - 1], OLD[at], OLD[at + 1])):
            assert likeliest_path(stepped(rollout, store))[:2] == OLD[at + 2 : at + 4]


AHEAD = Row(rollout=(7, 8, 9, 10, 11), group=0)


def drafter_of(*sources: Source) -> Drafter:
    return Drafter(HistoryStore(), sources=sources, min_acceptance=1e-6)


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [((50, 7, 8, 9), [10, 11]), ((8, 9, 10), [11]), ((8, 9), []), ((50, 8, 9), []), ((7, 8, 9, 50), [])],
)
def test_three_tokens_that_agree_lead_into_another_groups_rollout(
    rollout: tuple[int, ...], expected: list[int]
) -> None:
    row = Row(prompt_id="p", rollout=rollout, group=1)
    assert drafted(drafter_of("others").propose(draft_rows([AHEAD, row])))[1] == expected


def test_nothing_of_the_rows_own_group_counts_as_another_groups() -> None:
    rows = [replace(AHEAD, prompt=(30, 7, 8, 9, 31)), Row(prompt=(30, 7, 8, 9, 31), rollout=(7, 8, 9, 12, 7, 8, 9))]
    assert drafted(drafter_of("others").propose(draft_rows(rows))) == [[], []]


def test_running_rows_of_other_groups_add_no_source() -> None:
    row = Row(prompt_id="p", rollout=(7, 8, 9), group=1)
    drafts = drafter_of("history", "siblings", "own").propose(draft_rows([AHEAD, row]))
    assert drafted(drafts)[1] == []


def test_the_newest_four_matches_count() -> None:
    queries = [Row(rollout=(7, 8, 9, 20 + k), group=k) for k in range(6)]
    row = Row(prompt_id="p", rollout=(7, 8, 9), group=9)
    drafts = drafter_of("others").propose(draft_rows([*queries, row]))
    assert first_tokens(drafts, 6) == {22, 23, 24, 25}


def test_overwritten_rows_are_no_longer_drafted() -> None:
    rng = np.random.default_rng(0)
    drafter = drafter_of("others")
    rows, ids, gone = [Row(group=b // 2) for b in range(6)], list(range(6)), []
    num_drafted = 0
    for step in range(150):
        if step % 3 == 2:
            leaving = int(rng.integers(6))
            gone.append(rows[leaving])
            rows[leaving] = Row(group=rows[leaving].group, rollout=tuple(rng.integers(0, 4, 2)))
            ids[leaving] = step + 100
        drafts = drafter.propose(draft_rows(rows, row_ids=ids))
        # Six rows and three groups have 12 slots, so a row that left more than nine leaves ago is overwritten.
        Allowed(history={}, rows=rows, sources=("others",), gone=gone[-9:]).check(drafts, 64, 1e-6, is_chain=False)
        num_drafted += drafts.tokens.size
        rows = [replace(row, rollout=(*row.rollout, *rng.integers(0, 4, 2))) for row in rows]
    assert num_drafted > 1000


ALL = np.ones(NUM_SOURCES, np.bool_)
TOKEN_S = 75e-6


def gate_of(enabled: np.ndarray = ALL) -> SourceGate:
    return SourceGate(enabled, np.zeros(3))


def note(gate: SourceGate, num_rows: int, num_accepted: int, token_s: float = TOKEN_S) -> None:
    """Note `num_rows` rows; the first has `num_accepted` accepted tokens from other prompts, the rest no drafts."""
    offsets = np.minimum(np.arange(num_rows + 1), 1) * num_accepted
    features = np.full((num_accepted, NUM_KINDS), FIRST.match + OTHERS * NUM_LENGTHS, np.int32)
    gate.note(offsets, features, np.ones(num_accepted, np.int8), token_s)


def asks(gate: SourceGate, num_steps: int, *, num_accepted: int, num_rows: int = 64, token_s: float = TOKEN_S) -> str:
    """Return one letter per step: "a" if other prompts are searched, else "-"."""
    said = ""
    for _ in range(num_steps):
        said += "a" if gate.due()[OTHERS] else "-"
        note(gate, num_rows, num_accepted, token_s)
    return said


def test_a_useless_source_is_searched_in_one_step_of_16_after_512_rows() -> None:
    assert asks(gate_of(), 40, num_accepted=0) == "a" * 8 + "-" * 15 + "a" + "-" * 15 + "a"
    assert asks(gate_of(), 600, num_accepted=0, num_rows=1) == "a" * 512 + ("-" * 15 + "a") * 5 + "-" * 8


@pytest.mark.parametrize(
    # Searching other prompts for 64 rows takes 96 us.
    ("num_accepted", "token_s", "pays"),
    [(1, 96.1e-6, True), (1, 95.9e-6, False), (64, 1.6e-6, True), (64, 1.4e-6, False)],
)
def test_asking_pays_where_tokens_save_more_than_it_takes(num_accepted: int, token_s: float, pays: bool) -> None:
    said = asks(gate_of(), 200, num_accepted=num_accepted, token_s=token_s)
    assert said == "a" * 200 if pays else said.count("a") == 8 + 192 // 16


def test_a_source_that_pays_again_is_searched_in_every_step() -> None:
    gate = gate_of()
    asks(gate, 8 + 16 * 40, num_accepted=0)
    # In 1,024 rows 21 tokens pay. Older rows are forgotten, so 22 tokens of the next 64 rows are enough.
    assert asks(gate, 100, num_accepted=22) == "-" * 15 + "a" * 85


def gated_drafter(others: list[int]) -> Drafter:
    """Return a drafter whose only history is another prompt's and that drafts every match."""
    return Drafter(store_of({"p": {0: [others]}}), min_acceptance=1e-6)


def step(drafter: Drafter, truth: tuple[int, ...]) -> int:
    """Draft for 64 rows of a prompt without history, observe `truth`, and return the number of drafted tokens."""
    rows = draft_rows([Row(rollout=(7, 8, 9), group=b) for b in range(64)])
    drafts = drafter.propose(rows)
    walked = [walk(drafts, b, truth) for b in range(64)]
    drafter.observe(rows, np.array([count for count, _ in walked]), leaves=np.array([leaf for _, leaf in walked]))
    return int(drafts.tokens.size)


def test_a_drafter_looks_less_where_others_never_come_true_and_always_where_they_do() -> None:
    failing, working = gated_drafter([7, 8, 9, 10]), gated_drafter([7, 8, 9, 10])
    sizes = [step(failing, (50,)) for _ in range(40)]
    assert [size > 0 for size in sizes] == [k < 8 or (k - 8) % 16 == 15 for k in range(40)]
    assert min(step(working, (10,)) for _ in range(40)) > 0


@pytest.mark.parametrize(("row_s", "num_asked"), [(100e-6, 40), (90e-6, 10)])
def test_the_time_per_token_comes_from_costs(row_s: float, num_asked: int) -> None:
    """One of 64 rows can draft only from other prompts, always correctly.

    Searching takes 96 us, a row's share is `row_s`.
    """
    history = [7, 8, 9, 10, 11, 12]
    drafter = Drafter(store_of({"q": {0: [history]}, "p": {0: [[20, 21, 22, 23]]}}))
    drafter.use_costs(VerifyCosts(num_tokens=np.array([64, 65]), seconds=np.array([64 * row_s, 64 * row_s + 1e-9])))
    alone = Row(prompt_id="z", rollout=(20, 21, 22), group=99)
    sizes = []
    for _ in range(40):
        rows = draft_rows([alone, *(Row(rollout=(7, 8, 9), group=b) for b in range(63))])
        drafts = drafter.propose(rows)
        sizes.append(drafts.offsets[1])
        walked = [walk(drafts, b, (10, 11, 12) if b > 0 else (23,)) for b in range(64)]
        drafter.observe(rows, np.array([count for count, _ in walked]), leaves=np.array([leaf for _, leaf in walked]))
    assert sum(size > 0 for size in sizes) == num_asked
