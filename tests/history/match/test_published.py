"""The arena copies the running prompts' indexes unchanged, returns each entry's position, and stays small."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.history.reference import Row, draft_rows, first_tokens, store_of
from treering.history.draft.drafter import Drafter
from treering.history.match.published import Arena, Recent
from treering.history.store.files import StoredIndex
from treering.history.store.history_reader import HistoryReader, newest_first
from treering.history.store.prompt_index import MARKER
from treering.history.store.store import HistoryStore

PROMPT = st.dictionaries(
    st.integers(0, 9),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=7),
    min_size=1,
    max_size=6,
)


def test_every_slot_holds_its_prompts_index_with_markers_after_the_last() -> None:
    snapshot = store_of({p: {0: [[p, p + 1]] * (1 + p % 3)} for p in range(20)}).snapshot
    arena = Arena()
    for batch in ([0, 1], [1, 2, 2, "unknown"], [3, 0], list(range(20))):
        slots = arena.slots(batch, snapshot)
        spans = arena.spans[slots]
        for prompt_id, (start, size) in zip(batch, spans, strict=True):
            index = snapshot.get(prompt_id)
            assert size == (index.text.size if index else 0)
            if index:
                np.testing.assert_array_equal(arena.text[start : start + size], index.text)
                np.testing.assert_array_equal(arena.order[start : start + size], index.order)
        end = max(start + size for start, size in spans)
        assert arena.text[end] == MARKER
        assert arena.text.size > end
        assert arena.positions.size == arena.order.size


@given(PROMPT)
def test_every_entry_knows_its_position_in_its_rollout(versions: dict[int, list[Any]]) -> None:
    store = store_of({"q": versions}, max_epochs=9)
    arena = Arena()
    arena.slots(["q"], store.snapshot)
    rollouts = [tokens for version in sorted(versions, reverse=True) for tokens in versions[version]]
    expected = [position for tokens in rollouts for position in range(len(tokens) + 1)]
    assert arena.positions[: len(expected)].tolist() == expected


def test_prompts_that_are_gone_make_room() -> None:
    snapshot = store_of({p: {0: [[p] * 9]} for p in range(300)}).snapshot
    arena = Arena()
    for first in range(298):
        arena.slots([first, first + 1], snapshot)
    # Two prompts of 10 entries run. The arena holds at most twice that and one more batch, doubled by growth.
    assert arena.order.size <= 2 * (2 * 20 + 20)
    for _ in range(300):
        arena.slots([f"unknown {_}"], snapshot)
    assert arena.spans.shape[0] <= 16


def test_a_new_snapshot_starts_over() -> None:
    arena = Arena()
    for num_tokens in (300, 2, 5):
        snapshot = store_of({"a": {0: [[num_tokens] * num_tokens]}}).snapshot
        (slot,) = arena.slots(["a"], snapshot)
        start, size = arena.spans[slot]
        assert arena.text[start : start + size].tolist() == [-1] + [num_tokens] * num_tokens
        # Without the marker, leftovers of the last snapshot would be read as the text's continuation.
        assert arena.text[start + size] == MARKER


def test_prompts_that_were_published_last_stand_first_however_early_they_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HistoryStore(tmp_path / "history", max_epochs=2)
    # c and a have version 1, and c came later. d and b have version 0, and d came later although b has a new rollout.
    for version, prompt_ids in ((0, "abcd"), (1, "ca"), (0, "b")):
        for prompt_id in prompt_ids:
            store.add(prompt_id, [np.array([ord(prompt_id), version], np.int32)], version)
        store.publish()
    expected = list("cadb")
    reader = HistoryReader(tmp_path / "history")
    store.save(tmp_path / "saved.bin")
    for snapshot in (
        store.snapshot,
        dict(store.snapshot),
        reader.snapshot,
        HistoryStore.load(tmp_path / "saved.bin").snapshot,
    ):
        recent = Recent(1000)
        recent.take(snapshot)
        assert sorted("abcd", key=lambda one: recent.spans([one])[0, 0]) == expected
    store.close()
    with HistoryStore(tmp_path / "history") as reopened:
        # The order comes from the files' headers; no prompt is read for it.
        monkeypatch.setattr(StoredIndex, "index", None)
        assert newest_first(reopened.snapshot) == expected


@pytest.mark.parametrize(
    ("limit", "expected"), [(0, []), (1, [MARKER]), (4, [MARKER, 3, 4, MARKER]), (99, [MARKER, 3, 4, MARKER, 1, 2])]
)
def test_no_more_than_the_limit_is_kept(limit: int, expected: list[int]) -> None:
    recent = Recent(limit)
    recent.take(store_of({"a": {0: [[1, 2]]}, "b": {0: [[3, 4]]}}).snapshot)
    assert recent.text.tolist() == [*expected, MARKER]
    assert recent.order.size == len(expected)
    assert recent.spans(["a"]).tolist() == [[3, len(expected)] if limit > 3 else [0, 0]]


@pytest.mark.parametrize(("num_entries", "expected"), [(0, 1), (640, 10), (641, 11)])
def test_a_batch_that_never_empties_rereads_other_prompts_after_a_step_per_64_entries(
    num_entries: int, expected: int
) -> None:
    # A text has a marker before each rollout and one at its end.
    held = {"held": {0: [list(range(100, 100 + num_entries - 2))]}} if num_entries else {}
    store = store_of(held)
    drafter = Drafter(store, sources=("others",), min_acceptance=1e-6)

    def first_of(*ids: int) -> set[int]:
        rows = [Row(prompt_id=number, rollout=(1, 2, 3), group=number) for number in ids]
        return first_tokens(drafter.propose(draft_rows(rows, row_ids=list(ids))))

    assert first_of(0, 1) == set()
    store.add("new", [np.array([1, 2, 3, 4], np.int32)], version=1)
    store.publish()
    found = [first_of(step, step + 1) for step in range(1, 1 + expected)]
    assert found == [set()] * (expected - 1) + [{4}]
    # If no row is from the previous step, other prompts are read immediately.
    store.add("newer", [np.array([1, 2, 3, 5], np.int32)], version=2)
    store.publish()
    assert first_of(90, 91) == {4, 5}


def test_other_prompts_are_kept_only_as_a_source() -> None:
    store = store_of({"a": {0: [[5, 6, 7]]}, "b": {0: [[7, 8]]}})
    sizes = []
    for sources in (("history", "others"), ("history",)):
        drafter = Drafter(store, sources=sources)  # type: ignore[arg-type]
        drafter.propose(draft_rows([Row(prompt_id="a", rollout=(5,))]))
        sizes.append(drafter.num_bytes)
    # Seven entries of 8 bytes, and one key.
    assert sizes[0] - sizes[1] == 7 * 8 + 8


@pytest.mark.parametrize(("prompt_id", "elsewhere"), [("a", {7, 9}), ("b", {5, 9}), ("c", {5, 7})])
def test_a_rows_own_prompt_is_never_among_other_prompts(prompt_id: str, elsewhere: set[int]) -> None:
    store = store_of({"a": {0: [[5, 6]]}, "b": {0: [[7, 8]]}, "c": {0: [[9, 4]]}})
    drafter = Drafter(store, sources=("others",), min_acceptance=1e-6)
    assert first_tokens(drafter.propose(draft_rows([Row(prompt_id=prompt_id)])), 0) == elsewhere
    drafts = drafter.propose(draft_rows([Row(prompt_id=prompt_id, rollout=(k,)) for k in (5, 7, 9)]))
    own = {"a": 0, "b": 1, "c": 2}[prompt_id]
    assert [b for b in range(3) if drafts.offsets[b + 1] == drafts.offsets[b]] == [own]
