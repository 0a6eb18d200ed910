"""An interrupted publish leaves the state before or after it, and the next publish makes up for it."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.history.stores import assert_equal_snapshots, contents, data_files, ids, names_in, reopened, write
from treering.history.store import files
from treering.history.store.reader import HistoryReader
from treering.history.store.store import HistoryStore


def test_files_that_a_killed_writer_or_cleaner_left_are_removed_and_change_nothing(tmp_path: Path) -> None:
    folder, copy = tmp_path / "history", tmp_path / "copy"
    with HistoryStore(folder, max_epochs=1) as store:
        for version in range(4):
            store.add("a", [ids(version, 1, 2)], version)
            store.add("a" if version % 2 else "b", [ids(version)], version)
            store.publish()
            shutil.copytree(folder, copy, dirs_exist_ok=True)
    (copy / ".unfinished-history-00000009.bin").write_bytes(b"half")
    assert len(names_in(copy)) > len(names_in(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal_snapshots(store, reopened(copy, max_epochs=1))
    assert sorted(os.listdir(copy)) == sorted(os.listdir(folder))


def test_a_folder_that_cannot_be_written_costs_one_warning_and_is_written_later(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    write(folder, {"a": [1]})
    with HistoryStore(folder) as store:
        shutil.move(folder, tmp_path / "away")
        folder.write_text("in the way")
        store.add("b", [ids(2)], 1)
        with pytest.warns(UserWarning, match=r"could not be written to .*history") as warned:
            store.publish()
        assert len(warned) == 1
        assert contents(store) == {"a": {0: [-1, 1]}, "b": {1: [-1, 2]}}
        folder.unlink()
        shutil.move(tmp_path / "away", folder)
        store.publish()
    assert_equal_snapshots(store, reopened(folder))


@pytest.mark.parametrize("failing", range(1, 8))
def test_whatever_operation_fails_the_old_state_or_the_new_one_is_published(
    three: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations: flushing and renaming of two files, then opening and flushing of the folder."""
    count = 0

    def fail_at(operation: Any) -> Any:
        def run(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            if count == failing:
                raise OSError(28, "No space left on device")
            return operation(*arguments)

        return run

    before = contents(reopened(three))
    with HistoryStore(three) as store:
        store.add("c", [ids(9)], 9)
        with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for name in ("fsync", "replace", "open"):
                patched.setattr(files.os, name, fail_at(getattr(os, name)))
            store.publish()
        assert len(warned) == (failing <= count)
        assert count == 6 or failing <= count < 6
        seen = HistoryReader(three)
        assert contents(seen) in (before, contents(store))
        assert warned == [] or "No space left" in str(warned[0].message)
        if not warned:
            assert contents(seen) == contents(store)
        if contents(seen) == before:
            assert len(data_files(three)) == 3, "what was not published takes no room"
        store.publish()
        assert seen.refresh() or not warned or contents(seen) == contents(store)
        assert_equal_snapshots(store, seen)
    assert not list(three.glob(".unfinished*"))
    assert_equal_snapshots(store, reopened(three))
