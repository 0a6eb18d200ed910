"""Running rows draft from each other's newest tokens, and rows that leave do not disturb the others."""

from dataclasses import replace

import numpy as np
import pytest

from tests.history.reference import (
    Allowed,
    Row,
    draft_rows,
    drafted,
    first_tokens,
    same_drafts,
    store_of,
)
from treering.history.draft.drafter import Drafter
from treering.history.features import FIRST, NO_DRAFT, NUM_SOURCES
from treering.history.match.published import Arena
from treering.history.match.running_rows import RunningRows
from treering.history.store.store import HistoryStore

NOTHING: dict[str, dict[int, list[list[int]]]] = {}


def drafter_of(*sources: str, max_live_tokens: int = 4096) -> Drafter:
    return Drafter(HistoryStore(), sources=sources, min_acceptance=1e-6, max_live_tokens=max_live_tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("has_ids", [True, False])
def test_siblings_are_found_from_their_newest_token_on(has_ids: bool) -> None:
    drafter = drafter_of("siblings")
    ahead = (11, 12)
    for token in range(13, 40):
        ahead = (*ahead, token)
        # The other row ends in the token before the newest one, so only the newest one can be drafted.
        rows = [Row(rollout=ahead), Row(rollout=(50, ahead[-2]))]
        drafts = drafter.propose(draft_rows(rows, row_ids=[4, 9] if has_ids else None))
        assert drafted(drafts) == [[], [token]]


def test_rows_of_other_groups_are_not_siblings() -> None:
    rows = [Row(rollout=(7, 8, 9), group=0), Row(rollout=(7,), group=1)]
    assert drafted(drafter_of("siblings").propose(draft_rows(rows))) == [[], []]


@pytest.mark.parametrize("source", ["own", "siblings"])
def test_drafts_from_live_rows_end_where_the_rows_end(source: str) -> None:
    rng = np.random.default_rng(0)
    rows = [Row(rollout=tuple(rng.integers(0, 3, 30)), group=b // 3) for b in range(6)]
    drafts = drafter_of(source).propose(draft_rows(rows))
    Allowed(history=NOTHING, rows=rows, sources=(source,)).check(drafts, 40, 1e-6, is_chain=False)
    assert drafts.tokens.size > 0


@pytest.mark.parametrize("has_ids", [True, False])
def test_each_row_drafts_from_its_own_prompt_where_prompts_of_a_group_differ(has_ids: bool) -> None:
    prompts = [(7, 8, 9 + b, 20 + b, 30 + b) for b in range(6)] * 2
    drafter = drafter_of("own")
    for length in (3, 4):
        rows = [Row(prompt=prompt, rollout=(50, *prompt[1:length])) for prompt in prompts]
        drafts = drafter.propose(draft_rows(rows, row_ids=range(12) if has_ids else None))
        assert drafted(drafts) == [list(prompt[length:]) for prompt in prompts]


def test_the_prompt_is_drafted_from_and_its_end_is_not_crossed() -> None:
    row = Row(prompt=(7, 8, 9, 10), rollout=(30, 31, 8))
    assert drafted(drafter_of("own").propose(draft_rows([row]))) == [[9, 10]]


def test_a_finished_sibling_helps_on_and_is_nobodys_own() -> None:
    finished, running = (30, 31, 32, 33, 34, 35), (40, 31)
    for source, expected in (("siblings", [32, 33, 34, 35]), ("own", [])):
        drafter = drafter_of(source)
        drafter.propose(draft_rows([Row(rollout=finished), Row(rollout=(40,))], row_ids=[0, 1]))
        assert drafted(drafter.propose(draft_rows([Row(rollout=running)], row_ids=[1]))) == [expected]


def test_no_token_of_a_row_that_has_gone_is_drafted_as_own() -> None:
    rng = np.random.default_rng(0)
    drafter = drafter_of("own")
    rows, ids = [Row(rollout=()) for _ in range(4)], list(range(4))
    for step in range(120):
        if step % 3 == 2:
            # A long row leaves; a row with a short rollout of the same tokens takes its space.
            leaving = int(rng.integers(4))
            rows[leaving], ids[leaving] = Row(rollout=tuple(rng.integers(0, 9, 2))), step + 100
        drafts = drafter.propose(draft_rows(rows, row_ids=ids))
        Allowed(history=NOTHING, rows=rows, sources=("own",)).check(drafts, 40, 1e-6, is_chain=False)
        rows = [Row(rollout=(*row.rollout, *rng.integers(0, 9, 4))) for row in rows]


def test_a_slot_that_another_group_took_over_is_not_a_sibling_of_the_first() -> None:
    drafter = drafter_of("siblings")
    stay = Row(rollout=(80, 81), group=0)
    gone, taker = Row(rollout=(10, 11, 12, 13), group=0), Row(rollout=(10, 11, 12, 14), group=1, prompt_id="p")
    drafter.propose(draft_rows([stay, gone], row_ids=[0, 1]))
    for step in range(6):
        rows = [Row(rollout=(80, 81, 12), group=0)] + [taker] * (step + 1)
        drafts = drafter.propose(draft_rows(rows, row_ids=[0, *range(10, 11 + step)]))
        assert first_tokens(drafts, 0) <= {13}


def test_rows_of_the_same_line_without_ids_start_over_unless_tokens_continue() -> None:
    drafter = drafter_of("own")
    drafter.propose(draft_rows([Row(rollout=(10, 11, 12, 13, 14, 15))]))
    assert drafted(drafter.propose(draft_rows([Row(rollout=(20, 11))]))) == [[]]
    drafter.propose(draft_rows([Row(rollout=(10, 11, 12, 13, 14, 15))]))
    assert drafted(drafter.propose(draft_rows([Row(rollout=(10, 11))]))) == [[]]


def test_a_row_that_starts_over_hides_no_siblings_match() -> None:
    drafter = drafter_of("siblings")
    drafter.propose(draft_rows([Row(rollout=(7, 20)), Row(rollout=(7, 30)), Row(rollout=(5,))]))
    # The second row starts over and writes its 7 where the newest 7 already stands.
    rows = [Row(rollout=(7, 20)), Row(rollout=(7, 31)), Row(rollout=(5, 7))]
    assert first_tokens(drafter.propose(draft_rows(rows)), 2) == {20, 31}


def test_a_row_that_starts_over_and_ends_as_before_is_noted_again() -> None:
    drafter = drafter_of("siblings")
    drafter.propose(draft_rows([Row(rollout=(7, 20, 5)), Row(rollout=(9,))]))
    rows = [Row(rollout=(8, 21, 5)), Row(rollout=(8,))]
    assert first_tokens(drafter.propose(draft_rows(rows)), 1) == {21}


@pytest.mark.parametrize("has_ids", [True, False])
def test_rows_are_known_again_whatever_object_holds_them_and_no_other_rows_are(has_ids: bool) -> None:
    """Compare with a drafter that recognizes only the same object; the arrays are reused, as an engine does."""
    rng = np.random.default_rng(4)
    texts = {prompt: {0: [rng.integers(0, 6, 30).tolist() for _ in range(2)]} for prompt in ("p", "q")}
    drafter, unsure = (Drafter(store_of(texts), min_acceptance=0.01) for _ in range(2))
    unsure._search_state.live.has = lambda rows: rows is unsure._search_state.live._rows  # type: ignore[method-assign]
    ids, rows, num_known = list(range(4)), [Row(group=b // 2) for b in range(4)], 0
    groups, row_ids = np.zeros(4, np.int64), np.zeros(4, np.int64)
    for step in range(60):
        if rng.random() < 0.4:
            b = int(rng.integers(4))
            prompt, group = str(rng.choice(["p", "q"])), int(rng.integers(3))
            rows[b], ids[b] = Row(prompt_id=prompt, group=group), 4 + step
        groups[:], row_ids[:] = [row.group for row in rows], ids
        batch = replace(draft_rows(rows), groups=groups, row_ids=row_ids if has_ids else None)
        num_known += drafter._search_state.live.has(batch)
        assert same_drafts(drafter.propose(batch), unsure.propose(replace(batch)))
        rows = [replace(row, rollout=(*row.rollout, int(rng.integers(0, 6)))) for row in rows]
    assert 20 < num_known < 50


@pytest.mark.parametrize(("owner", "name"), [(Arena, "slots"), (RunningRows, "_assign")])
def test_rows_that_could_not_be_found_are_not_known_when_they_come_again(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    store = store_of({"p": {0: [[1, 2, 7, 8]]}, "q": {0: [[1, 2, 3, 4, 5]]}})
    drafter, fresh = (Drafter(store, min_acceptance=1e-6, sources=("history",)) for _ in range(2))
    before, rows = (draft_rows([Row(prompt_id=prompt, rollout=(1, 2))], row_ids=[k]) for k, prompt in enumerate("pq"))
    drafter.propose(before)
    with monkeypatch.context() as failing:
        failing.setattr(owner, name, _fail)
        with pytest.raises(MemoryError):
            drafter.propose(rows)
    assert name == "slots" or not drafter._search_state.live.has(before)
    assert same_drafts(drafter.propose(replace(rows)), fresh.propose(rows))


def _fail(*_: object) -> None:
    raise MemoryError


def test_memory_follows_the_number_of_running_rows() -> None:
    live = RunningRows(4096)
    for first in range(0, 3000, 4):
        live.slots(draft_rows([Row(rollout=(1, 2), group=first // 8)] * 4, row_ids=[first + k for k in range(4)]))
        live.slots(draft_rows([Row(rollout=(1, 2), group=first // 8)] * 4, row_ids=[first + k + 2 for k in range(4)]))
    # Two slots for each of the four rows and as many for groups, whatever came before. Four rollouts of 3 units and
    # four prompts of 1 unit, and as much again for rows that left.
    assert live.running.num_noted.size <= 16
    assert live.running.owners.size <= 2 * (4 * 3 + 4)


def test_a_row_that_changes_its_group_s_number_keeps_what_is_known_of_it() -> None:
    drafter = drafter_of("own")
    row = Row(prompt=(7, 8, 9), rollout=(1,), group=1)
    other = Row(prompt=(4,), rollout=(1,), group=2)
    drafter.propose(draft_rows([row], row_ids=[1]))
    renamed = replace(row, group=3)
    drafter.propose(draft_rows([renamed, other], row_ids=[1, 2]))
    drafts = drafter.propose(draft_rows([renamed, other, replace(row, rollout=(7,), max_drafts=2)], row_ids=[1, 2, 4]))
    assert drafted(drafts)[2] == [8, 9]


def after_no_draft() -> Drafter:
    """Return a drafter whose weights favour rows without a draft at the previous step."""
    drafter = Drafter(store_of({"q": {0: [[1, 2, 3, 4, 5, 6, 7, 8]]}}), min_acceptance=1e-6, sources=("history",))
    state = drafter.state()
    state["weights"][FIRST.outcome + NO_DRAFT * NUM_SOURCES] = 2.0
    drafter.load_state(state)
    return drafter


def test_a_row_starts_without_the_outcome_of_the_row_whose_slot_it_takes() -> None:
    stays, new = Row(rollout=(90,)), Row(rollout=(1, 2, 3))
    fresh = after_no_draft().propose(draft_rows([stays, new], row_ids=[0, 9]))
    used, slots = after_no_draft(), []
    for step in range(12):
        # The leaving row had no draft at two tokens, so its next context would have three, like the new row's.
        used.propose(draft_rows([stays, Row(rollout=(50, 51))], row_ids=[0, 100 + step]))
        slots.append(int(used._search_state.live_slots[1]))
        drafts = used.propose(draft_rows([stays, new], row_ids=[0, 200 + step]))
        slots.append(int(used._search_state.live_slots[1]))
        assert drafts.acceptance.tolist() == fresh.acceptance.tolist()
    assert any(slot in slots[:step:2] for step, slot in enumerate(slots) if step % 2 == 1)


def test_the_first_token_of_a_sibling_is_drafted_after_all_texts_have_moved() -> None:
    drafter = drafter_of("siblings")
    for longer in ((), tuple(range(100, 400))):
        rows = [Row(rollout=longer), Row(max_drafts=2)]
        drafts = drafter.propose(draft_rows(rows, row_ids=[0, 1]))
    assert drafted(drafts)[1] == [100, 101]


def test_no_token_is_lost_while_a_rollout_grows() -> None:
    drafter = drafter_of("own")
    for length in range(400):
        row = Row(prompt=(7, 8), rollout=tuple(range(100, 100 + length)))
        drafter.propose(draft_rows([row], row_ids=[1]))
        running = drafter._search_state.live.running
        slot = running.slots[0]
        assert (running.first[slot], running.num_noted[slot]) == (2, 2 + length)
        begin = running.begins[slot]
        assert running.chains.tokens[begin + 1 : begin + 2 + length].tolist() == [*row.rollout, -1]


def test_no_stale_token_is_drafted_after_texts_have_moved() -> None:
    """Rows come, grow and leave; every draft continues a current text of the group or a text of a row that left."""
    rng = np.random.default_rng(5)
    drafter, texts = drafter_of("siblings", "own"), dict[int, tuple[int, ...]]()
    rows, ids = [Row(prompt=tuple(range(b, b + 60 * b + 3)), group=b % 2) for b in range(6)], list(range(6))
    num_drafted = 0
    for step in range(80):
        if step % 5 == 4:
            leaving = int(rng.integers(6))
            prompt = tuple(rng.integers(0, 12, int(rng.integers(1, 400))))
            rows[leaving], ids[leaving] = Row(prompt=prompt, group=int(rng.integers(2))), 100 + step
        drafts = drafter.propose(draft_rows(rows, row_ids=ids))
        for key, row in zip(ids, rows, strict=True):
            texts[2 * key + row.group + 1000] = row.rollout
            texts[-2 * key - row.group] = row.prompt
        for b, row in enumerate(rows):
            own = [text for number, text in texts.items() if number % 2 == row.group]
            pairs = {pair for text in own for pair in zip((-1, *text), text, strict=False)}
            begin, end = drafts.offsets[b], drafts.offsets[b + 1]
            last = row.rollout[-1] if row.rollout else -1
            for i in range(begin, end):
                parent = drafts.parents[i]
                before = last if parent < 0 else int(drafts.tokens[begin + parent])
                num_drafted += 1
                assert (before, int(drafts.tokens[i])) in pairs or (parent < 0 and not row.rollout)
        rows = [replace(row, rollout=(*row.rollout, *rng.integers(0, 12, 5).tolist())) for row in rows]
    assert num_drafted > 1000


def test_prompts_that_grow_while_their_rows_stay_are_found_with_all_their_tokens() -> None:
    drafter = drafter_of("own")
    for size in (5, 100, 700):
        prompt = tuple(range(size))
        drafts = drafter.propose(draft_rows([Row(prompt=prompt, rollout=(900, 0, 1, 2), max_drafts=4)], row_ids=[1]))
        assert drafted(drafts) == [list(prompt[3:7])]
