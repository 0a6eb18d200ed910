"""Empty, tiny, huge and changing histories and rows still give valid drafts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.history.reference import (
    Allowed,
    Row,
    draft_rows,
    drafted,
    first_tokens,
    likeliest_path,
    one_draft,
    same_drafts,
    simple,
    store_of,
)
from treering.errors import InputError
from treering.history.draft.drafter import Drafter
from treering.history.match.published import Arena
from treering.history.match.running import make_hash_chains
from treering.history.store.prompt_index import PromptIndex
from treering.history.store.store import HistoryStore
from treering.types import PromptId

LARGEST = 2**31 - 1


def test_an_empty_store_drafts_only_from_running_rows() -> None:
    drafter = Drafter(HistoryStore(), min_acceptance=1e-6)
    assert one_draft(drafter, Row(prompt=(7, 8, 9), rollout=(8,)))[0] == 9
    assert one_draft(drafter, Row(prompt=(7, 8, 9), rollout=(4,))) == []
    assert one_draft(drafter, Row(prompt=(), rollout=())) == []
    assert one_draft(drafter, Row(prompt=(3,), rollout=())) == []


def test_the_first_token_is_drafted_from_where_rollouts_began() -> None:
    drafter = simple([4, 5], [4, 6], [7])
    for prompt in ((5, 6), (5,), ()):
        row = Row(prompt=prompt, rollout=())
        if row.context:
            assert first_tokens(drafter.propose(draft_rows([row]))) == {4, 7}


@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_token_ids_of_any_size_are_drafted(shape: Any) -> None:
    drafter = simple([LARGEST, LARGEST - 1, 0, LARGEST], shape=shape, sources=("history",))
    assert one_draft(drafter, Row(prompt=(LARGEST,), rollout=(LARGEST, LARGEST - 1))) == [0, LARGEST]
    siblings = simple([3], shape=shape, sources=("siblings", "own"))
    rows = [Row(rollout=(LARGEST, 7, LARGEST - 1)), Row(rollout=(LARGEST,))]
    assert likeliest_path(siblings.propose(draft_rows(rows)), 1) == [7, LARGEST - 1]


def test_a_context_of_ten_thousand_tokens_continues_like_its_history() -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, 10_040).tolist()
    row = Row(prompt=tuple(range(9000)), rollout=tuple(tokens[:10_000]), max_drafts=20)
    drafter = Drafter(store_of({"q": {0: [tokens]}}))
    assert one_draft(drafter, row) == tokens[10_000:10_020]


def test_a_repeating_row_longer_than_what_is_kept_live_is_drafted_from_its_newest_tokens() -> None:
    cycle = list(range(100, 110))
    drafter = Drafter(HistoryStore(), max_live_tokens=32, sources=("own",), min_acceptance=1e-6)
    for length in (31, 32, 33, 40, 47, 48, 200, 201):
        rollout = tuple((cycle * 30)[:length])
        assert one_draft(drafter, Row(rollout=rollout, max_drafts=4)) == (cycle * 30)[length : length + 4]


def test_dropping_part_of_a_long_sibling_changes_no_other_estimate() -> None:
    tokens = tuple(np.random.default_rng(0).permutation(5000)[:600].tolist())
    rows = draft_rows([Row(rollout=tokens), Row(rollout=tokens[:560], max_drafts=9)])
    short, whole = (
        Drafter(HistoryStore(), max_live_tokens=size, sources=("siblings",)).propose(rows) for size in (256, 4096)
    )
    assert drafted(short)[1] == list(tokens[560:569])
    assert same_drafts(short, whole)


@dataclass
class Replaceable:
    """Source whose snapshot tests replace."""

    snapshot: Mapping[PromptId, PromptIndex]


def test_a_store_may_be_replaced_between_steps_by_one_of_any_size() -> None:
    histories = [{"q": {0: [[size] * 9, list(range(size))]}, size: {1: [[size] * 5]}} for size in (3, 2000, 0, 1, 40)]
    snapshots = [store_of(history).snapshot for history in histories]
    source = Replaceable(snapshots[0])
    own = ("history", "siblings", "own")
    drafter = Drafter(source, min_acceptance=0.01, sources=own)
    rollout: tuple[int, ...] = (1, 2)
    for step in range(12):
        source.snapshot, history = snapshots[step % 5], histories[step % 5]
        rows = [Row(rollout=rollout), Row(prompt_id=list(history)[1], rollout=rollout, group=1)]
        drafts = drafter.propose(draft_rows(rows, row_ids=[7, 8]))
        Allowed(history=history, rows=rows, sources=own).check(drafts, 40, 0.01, is_chain=False)
        if step % 5 == 1:
            assert likeliest_path(drafts)[:3] == [rollout[-1] + k for k in (1, 2, 3)]
        rollout = (*rollout, rollout[-1] + 1)


def test_an_index_without_an_entry_drafts_nothing() -> None:
    nothing = np.zeros(0, np.int32)
    index = PromptIndex(
        text=nothing,
        order=nothing.copy(),
        versions=np.zeros(0, np.int64),
        starts=np.zeros(1, np.int64),
    )
    good = store_of({"p": {0: [[1, 2]] * 2}}).snapshot["p"]
    drafter = Drafter(Replaceable({"q": index, "p": good, "r": index}), min_acceptance=1e-6, sources=("history",))
    rows = [Row(prompt_id=p, rollout=(1,), group=b) for b, p in enumerate(("q", "p", "r", "absent"))]
    assert drafted(drafter.propose(draft_rows(rows))) == [[], [2], [], []]


ENDLESS = 2**31 - 1
"""Number of entries; the array repeats one entry, so it takes no memory."""


def endless_index(num_entries: int) -> PromptIndex:
    entries = np.broadcast_to(np.int32(5), (num_entries,))
    return PromptIndex(
        text=entries,
        order=entries.view(),
        versions=np.zeros(1, np.int64),
        starts=np.array([0, num_entries]),
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_hash_chains(ENDLESS + 1), "lower max_live_tokens"),
        (lambda: PromptIndex.build({v: np.broadcast_to(np.int32(5), (2**30,)) for v in range(2)}), "max_epochs"),
        (lambda: Arena().slots("qp", {p: endless_index(2**30) for p in "qp"}), "fewer prompts at a time"),
    ],
)
def test_more_entries_than_their_positions_can_count_are_refused_before_room_is_made(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(InputError, match=rf"at most 2147483647 entries, got 21474836\d\d; .*{message}"):
        make()


def test_no_rows_and_no_room_give_no_drafts() -> None:
    drafter = simple([1, 2])
    empty = draft_rows([])
    assert drafter.propose(empty).offsets.tolist() == [0]
    drafter.observe(empty, np.zeros(0, np.int64))
    assert one_draft(drafter, Row(rollout=(1,), max_drafts=0)) == []


def test_rows_may_be_a_view_of_a_larger_buffer_and_stay_as_they_are() -> None:
    rows = draft_rows([Row(rollout=(1,)), Row(rollout=(1, 2), group=1)])
    buffer = np.full((4, 40), 3, np.int32)
    buffer[:2, : rows.tokens.shape[1]] = rows.tokens
    before = buffer.copy()
    expected = simple([1, 2, 4]).propose(rows)
    assert drafted(expected) == [[2, 4], [4]]
    for view in (buffer[:2], buffer[:2, : rows.tokens.shape[1]]):
        assert same_drafts(simple([1, 2, 4]).propose(replace(rows, tokens=view)), expected)
    np.testing.assert_array_equal(buffer, before)
