"""Damaged, missing and half-written files cost a warning and their rollouts (law 7)."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.history.stores import assert_equal_snapshots, contents, data_files, ids, reopened, write
from treering.history.store import files
from treering.history.store.history_reader import HistoryReader
from treering.history.store.store import HistoryStore


def test_a_damaged_prompt_costs_only_its_rollouts_and_is_not_written_again(three: Path) -> None:
    victim = data_files(three)[1]
    data = bytearray(victim.read_bytes())
    data[data.index(np.array([-1, 4], np.int32).tobytes())] ^= 1
    victim.write_bytes(data)
    with HistoryStore(three) as store:
        assert len(store.snapshot) == 4
        with pytest.warns(UserWarning, match=rf"prompt 'c' in .*{victim.name} are dropped: damaged") as warned:
            assert store.snapshot["c"].text.size == 0
        assert len(warned) == 1
        # This publish is large enough to merge the victim.
        store.add("b", [np.full(300_000, 9, np.int32)], 9)
        store.publish()
        assert not victim.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sorted(contents(reopened(three))) == ["a", "b", "d"]


def test_new_rollouts_of_a_damaged_prompt_replace_it(three: Path) -> None:
    victim = data_files(three)[2]
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    with HistoryStore(three) as store:
        store.add("d", [ids(1)], 9)
        with pytest.warns(UserWarning, match="prompt 'd'"):
            store.publish()
        assert store.num_bytes == sum(store.snapshot[prompt_id].num_bytes for prompt_id in "abcd")
    assert contents(reopened(three))["d"] == {9: [-1, 1]}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:60] + b"?" + data[61:], "cut off or damaged in its header"),
        (lambda data: data[:60], "cut off or damaged in its header"),
        (lambda data: data[:20], "cut off"),
        (lambda data: b"", "it is empty or not a file"),
        (lambda data: b"PK\3\4" + data, "it is not a history of this version of Treering"),
        (lambda data: b"RINGHIST" + bytes(100), "it is not a history of this version of Treering"),
    ],
)
def test_a_damaged_file_costs_one_warning_that_names_it_and_the_rest_stays(
    three: Path, damage: Any, reason: str
) -> None:
    victim = data_files(three)[1]
    victim.write_bytes(damage(victim.read_bytes()))
    num_bytes = victim.stat().st_size
    with pytest.warns(UserWarning, match=rf"{victim.name} is dropped: {reason}; .*costs speed only") as warned:
        store = HistoryStore(three)
    assert len(warned) == 1
    assert sorted(contents(store)) == ["a", "d"]
    store.add("b", [ids(7)], 4)
    store.publish()
    store.close()
    # The file stays for a person to inspect, and no other file takes its name.
    assert victim.stat().st_size == num_bytes
    with pytest.warns(UserWarning, match=rf"{victim.name} is dropped") as warned:
        assert_equal_snapshots(store, reopened(three))
    assert len(warned) == 1


def test_a_missing_file_costs_its_prompts_and_other_files_are_left_alone(three: Path) -> None:
    data_files(three)[1].unlink()
    (three / "notes.txt").write_text("mine")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sorted(contents(reopened(three))) == ["a", "d"]
    assert (three / "notes.txt").read_text() == "mine"


def test_a_folder_in_the_place_of_a_file_costs_one_warning(tmp_path: Path) -> None:
    write(tmp_path, {"a": [1]})
    (tmp_path / "history-00000007.bin").mkdir()
    with pytest.warns(UserWarning, match="history-00000007.bin is dropped: it is empty or not a file") as warned:
        store = HistoryStore(tmp_path)
    assert len(warned) == 1
    store.add("b", [ids(2)], 1)
    store.publish()
    assert (tmp_path / "history-00000008.bin").exists()
    store.close()


def test_files_that_a_killed_writer_or_cleaner_left_are_removed_and_change_nothing(tmp_path: Path) -> None:
    folder, copy = tmp_path / "history", tmp_path / "copy"
    with HistoryStore(folder, max_epochs=1) as store:
        for version in range(4):
            store.add("a", [ids(version, 1, 2)], version)
            store.add("a" if version % 2 else "b", [ids(version)], version)
            store.publish()
            shutil.copytree(folder, copy, dirs_exist_ok=True)
    (copy / ".unfinished-history-00000009.bin").write_bytes(b"half")
    assert len(data_files(copy)) > len(data_files(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal_snapshots(store, reopened(copy, max_epochs=1))
    assert not list(copy.glob(".unfinished*"))


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


def test_a_publish_that_fails_leaves_the_old_state_and_the_next_one_makes_up_for_it(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    before = contents(reopened(three))
    with HistoryStore(three) as store:
        store.add("c", [ids(9)], 9)
        with monkeypatch.context() as patched:
            patched.setattr(files.os, "replace", fail)
            with pytest.warns(UserWarning, match="No space left"):
                store.publish()
        reader = HistoryReader(three)
        assert contents(reader) == before
        assert len(data_files(three)) == 3, "what was not published takes no room"
        assert not list(three.glob(".unfinished*"))
        store.publish()
        assert reader.refresh()
        assert_equal_snapshots(store, reader)
    assert_equal_snapshots(store, reopened(three))
