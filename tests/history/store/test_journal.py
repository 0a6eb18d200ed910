"""A store's folder returns what was published, stays small and is written in small parts."""

import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.history.stores import (
    MANIFEST,
    assert_equal_snapshots,
    contents,
    data_files,
    ids,
    names_in,
    num_bytes_on_disk,
    reopened,
    write,
)
from treering.errors import StateError
from treering.history.store import blocks
from treering.history.store import store as store_module
from treering.history.store.reader import HistoryReader
from treering.history.store.store import HistoryStore


def test_a_folder_gives_back_what_was_published_in_the_same_order(tmp_path: Path) -> None:
    store = write(tmp_path / "new" / "folder", {"a": [1, 2], "b": [3]}, {"a": [4]}, {"c": [5], "a": [6, 7], "b": [8]})
    again = reopened(tmp_path / "new" / "folder")
    assert_equal_snapshots(store, again)
    assert (again.num_bytes, again.num_tokens) == (store.num_bytes, store.num_tokens)
    assert contents(store)["a"] == {2: [-1, 6, 7], 1: [-1, 4]}


def test_opening_reads_no_rollout_and_builds_nothing(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks.Block, "index", property(lambda _: pytest.fail("read")))
    monkeypatch.setattr(blocks.PromptIndex, "build", lambda *_: pytest.fail("built"))
    with HistoryStore(three) as store:
        assert (store.num_prompts, store.num_tokens) == (4, 170_003)
        assert "b" in store.snapshot
        assert "e" not in store.snapshot


def test_opening_an_untouched_folder_writes_nothing(three: Path) -> None:
    before = [(file.name, file.stat().st_mtime_ns) for file in three.glob("[!.]*")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reopened(three)
    assert [(file.name, file.stat().st_mtime_ns) for file in three.glob("[!.]*")] == before


def test_a_publish_of_one_prompt_writes_a_small_part(three: Path) -> None:
    before = {file: file.stat().st_ino for file in data_files(three)[:2]}
    with HistoryStore(three) as store:
        for version in range(3, 9):
            store.add("d", [ids(version)], version)
            store.publish()
            assert len(data_files(three)) == 3
    assert {file: file.stat().st_ino for file in before} == before
    assert data_files(three)[2].stat().st_size < 1000


def test_a_large_publish_is_split_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MIN_FILE_BYTES", 500)
    store = write(tmp_path, {f"q{i}": [i] * 50 for i in range(10)}, max_bytes=10_000)
    # 51 * 8 + 36 bytes a prompt, two to a file.
    assert len(data_files(tmp_path)) == 5
    assert_equal_snapshots(store, reopened(tmp_path))


@pytest.mark.parametrize("budget", [1 << 30, 900])
def test_the_folder_stays_below_twice_what_is_alive_and_is_the_store(
    tmp_path: Path, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_MIN_FILE_BYTES", 300)
    rng = np.random.default_rng(0)
    reader = HistoryReader(tmp_path)
    with HistoryStore(tmp_path, max_epochs=2, max_bytes=budget) as store:
        for version in range(40):
            for prompt_id in rng.choice(8, size=3, replace=False).tolist():
                store.add(prompt_id, [rng.integers(0, 9, rng.integers(1, 30)).astype(np.int32)], version)
            store.publish()
            assert store.num_bytes <= num_bytes_on_disk(tmp_path) <= 2 * store.num_bytes
            assert reader.refresh()
            assert_equal_snapshots(store, reader)
    assert_equal_snapshots(store, reopened(tmp_path, max_epochs=2, max_bytes=budget))


def test_opening_with_tighter_limits_keeps_the_newest_and_cleans_the_folder(tmp_path: Path) -> None:
    write(tmp_path, *({"a": [v, v, v]} for v in range(6)), max_epochs=6)
    store = reopened(tmp_path, max_epochs=1)
    assert contents(store) == {"a": {5: [-1, 5, 5, 5]}}
    assert num_bytes_on_disk(tmp_path) == store.num_bytes == 4 * 8 + 16 + 8
    assert contents(reopened(tmp_path, max_bytes=1)) == {}
    assert names_in(tmp_path) == [MANIFEST]


def test_a_path_that_is_no_folder_is_refused_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StateError, match="give another path, or None"):
            HistoryStore(path)
