"""The store returns what was added, within its limits."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.history.reference import Row, draft_rows, drafted, store_of
from tests.history.stores import ADDS, ARRAYS, assert_equal_snapshots, contents, ids
from treering.errors import ConfigError, InputError, StateError
from treering.history.draft.drafter import Drafter
from treering.history.store.prompt_index import PromptIndex
from treering.history.store.store import HistoryStore


def filled(adds: list[Any], **options: int) -> HistoryStore:
    store = HistoryStore(**options)
    for prompt_id, version, rollouts, publishes in adds:
        store.add(prompt_id, [np.array(rollout, np.int32) for rollout in rollouts], version)
        if publishes:
            store.publish()
    return store


def test_a_failed_publish_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HistoryStore()
    store.add("a", [ids(1)], 0)
    with monkeypatch.context() as patched:
        patched.setattr(PromptIndex, "build", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            store.publish()
    store.add("a", [ids(2)], 0)
    store.publish()
    assert contents(store) == {"a": {0: [-1, 1, -1, 2]}}
    store.close()
    for call in (store.publish, lambda: store.add("a", [ids(1)], 0)):
        with pytest.raises(StateError, match="this history is closed; open it again"):
            call()


def test_a_snapshot_never_changes_and_prompts_that_did_not_change_are_shared() -> None:
    store = store_of({"a": {0: [[1, 2]]}, "b": {0: [[3]]}}, max_epochs=1)
    before = store.snapshot
    index = before["a"]
    copies = {name: getattr(index, name).copy() for name in ARRAYS}
    store.add("a", [ids(9, 9, 9)], 1)
    assert store.snapshot is before
    store.publish()
    assert before["a"] is index
    for name, copy in copies.items():
        np.testing.assert_array_equal(getattr(index, name), copy)
        assert not getattr(index, name).flags.writeable
    assert store.snapshot["a"].text.tolist() == [-1, 9, 9, 9]
    assert store.snapshot["b"] is before["b"]
    with pytest.raises(TypeError):
        store.snapshot["c"] = index  # type: ignore[index]
    unchanged = store.snapshot
    store.publish()
    assert store.snapshot is unchanged


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", [ids(1), ids(-1)], 0), r"token ids must be in .*-1.*rollout 1"),
        (("a", [ids(1), np.array([2**31])], 0), r"token ids must be in .*2147483648"),
        (("a", [ids(1), np.array([0.5])], 0), r"integer token ids, got float64"),
        (("a", [ids(1), np.array([True])], 0), r"integer token ids, got bool"),
        (("a", [ids(1), np.zeros((1, 2), np.int32)], 0), r"one dimension.*\(1, 2\)"),
        (("a", [ids(1), np.zeros((0, 2), np.int32)], 0), r"one dimension.*\(0, 2\)"),
        (("a", [ids(1), [[1], [1, 2]]], 0), r"rollout 1 of 'a' is ragged"),
        (("a", [ids(1)], -1), r"version must be an integer in .*, got -1"),
        (("a", [ids(1)], True), r"version must be an integer in .*, got True"),
        (("a", [ids(1)], 1.0), r"version must be an integer in .*, got 1.0"),
        (("a", [ids(1)], 2**70), r"version must be an integer in .*2147483647.*, got 1180591620717411303424"),
        ((("a", 1), [ids(1)], 0), r"prompt_id must be a string or an integer, got \('a', 1\)"),
        ((True, [ids(1)], 0), r"prompt_id must be a string or an integer, got True"),
        (("a", None, 0), "a list of token id lists, got None; write .tokens. for one"),
        (("a", "text", 0), "a list of token id lists, got 'text'"),
    ],
)
def test_a_refused_add_teaches_and_changes_nothing(arguments: Any, message: str) -> None:
    store = HistoryStore()
    with pytest.raises(InputError, match=message):
        store.add(*arguments)
    store.publish()
    assert contents(store) == {}


def test_no_rollouts_and_empty_rollouts_are_fine_and_leave_nothing() -> None:
    store = HistoryStore()
    store.add("a", [], 0)
    store.add("a", [ids(), np.array([])], 0)
    store.add("b", [ids(), ids(4)], 0)
    store.publish()
    assert contents(store) == {"b": {0: [-1, 4]}}


@given(ADDS, st.integers(1, 3), st.sampled_from([100, 10_000]))
def test_a_loaded_store_equals_the_saved_one_in_all_that_follows(adds: list[Any], epochs: int, budget: int) -> None:
    store = filled(adds, max_epochs=epochs, max_bytes=budget)
    store.publish()
    with TemporaryDirectory() as folder:
        store.save(Path(folder, "history.bin"))
        loaded = HistoryStore.load(Path(folder, "history.bin"), max_epochs=epochs, max_bytes=budget)
    assert_equal_snapshots(store, loaded)
    assert (loaded.num_bytes, loaded.num_tokens) == (store.num_bytes, store.num_tokens)
    rows = draft_rows([Row(prompt_id=p, rollout=r) for p in ("a", 7) for r in ((), (1,), (0, 1), (2, 2, 3))])
    for step in range(2):
        for each in (store, loaded):
            each.add("a", [ids(0, 1, 2)], 3 + step)
            each.publish()
        assert_equal_snapshots(store, loaded)
        drafts = [drafted(Drafter(each, min_acceptance=0.01).propose(rows)) for each in (store, loaded)]
        assert drafts[0] == drafts[1]


def test_integers_and_strings_stay_different_prompts(tmp_path: Path) -> None:
    store = store_of({7: {0: [[1]]}, "7": {0: [[2]]}, 'ü"\n': {0: [[3]]}})
    store.save(tmp_path / "history.bin")
    assert contents(HistoryStore.load(tmp_path / "history.bin")) == contents(store)


def test_a_damaged_or_missing_save_costs_one_warning_and_gives_an_empty_store(tmp_path: Path) -> None:
    file = tmp_path / "history.bin"
    store_of({"a": {0: [[1, 2]]}}).save(file)
    data = bytearray(file.read_bytes())
    data[30] ^= 1
    file.write_bytes(data)
    for path in (file, tmp_path / "absent.bin", tmp_path):
        with pytest.warns(UserWarning, match=path.name) as warned:
            store = HistoryStore.load(path)
        assert len(warned) == 1
        assert contents(store) == {}
        store.add("b", [ids(1)], 0)
        store.publish()
        assert contents(store) == {"b": {0: [-1, 1]}}


def test_only_the_damaged_prompt_of_a_save_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "history.bin"
    store = store_of({"a": {0: [[1, 2]]}, "b": {0: [[3, 4]]}})
    store.save(file)
    data = bytearray(file.read_bytes())
    data[data.index(np.array((-1, 3, 4), np.int32).tobytes())] ^= 2
    file.write_bytes(data)
    with pytest.warns(UserWarning, match=r"prompt 'b' in .*history.bin are dropped: damaged") as warned:
        loaded = HistoryStore.load(file)
    assert len(warned) == 1
    assert contents(loaded) == {"a": {0: [-1, 1, 2]}}


@pytest.mark.parametrize("option", ["max_bytes", "max_epochs"])
def test_a_limit_below_one_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"{option} .* at least 1, got 0"):
        HistoryStore(**{option: 0})
    with pytest.raises(ConfigError, match=rf"{option} .* integer.*, got 1.5"):
        HistoryStore(**{option: 1.5})


ADDS = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.integers(0, 6), st.integers(1, 6), st.booleans()), min_size=1, max_size=40
)
Model = dict[Any, dict[int, list[int]]]


def num_bytes_of(model: Model) -> int:
    """Count 8 bytes per entry, 16 per version and 8 per prompt."""
    return sum(8 + sum(16 + 8 * len(text) for text in versions.values()) for versions in model.values())


def evict(model: Model, budget: int) -> None:
    while num_bytes_of(model) > budget:
        # min returns the first of equals, so ties go to the prompt that came first.
        oldest = min(model, key=lambda prompt: min(model[prompt]))
        del model[oldest][min(model[oldest])]
        if not model[oldest]:
            del model[oldest]


@given(ADDS, st.integers(40, 600))
def test_the_store_keeps_what_a_search_through_all_of_it_keeps(adds: list[Any], budget: int) -> None:
    store, model, pending = HistoryStore(max_bytes=budget, max_epochs=2), {}, {}
    for number, (prompt, version, size, publishes) in enumerate(adds):
        store.add(prompt, [np.full(size, number, np.int32)], version)
        pending.setdefault(prompt, []).append((version, [-1, *[number] * size]))
        if not publishes:
            continue
        store.publish()
        for name, texts in pending.items():
            versions = model.setdefault(name, {})
            for at, text in texts:
                versions[at] = versions.get(at, []) + text
            model[name] = {at: versions[at] for at in sorted(versions, reverse=True)[:2]}
        pending = {}
        evict(model, budget)
        kept = {p: {v: t.tolist() for v, t in index.texts().items()} for p, index in store.snapshot.items()}
        assert list(kept.items()) == list(model.items())
        assert store.num_bytes == num_bytes_of(model)


def test_a_prompt_that_comes_back_has_lost_its_old_rank() -> None:
    """In bytes, a takes 40, then 56 with two rollouts; b takes 176 and c 40."""
    store = HistoryStore(max_bytes=230)
    for prompt, num_tokens in (("a", 1), ("a", 1), ("b", 18), ("a", 1)):
        store.add(prompt, [np.ones(num_tokens, np.int32)], 0)
        store.publish()
    assert list(store.snapshot) == ["b", "a"]
    store.add("c", [np.ones(1, np.int32)], 0)
    store.publish()
    assert list(store.snapshot) == ["a", "c"]
