"""Damage to a folder costs one warning and the damaged data; everything else is read, and nothing wrong is (law 7)."""

import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.history.stores import MANIFEST, assert_equal_snapshots, contents, data_files, ids, reopened, write
from treering.history.store import blocks, files, manifest
from treering.history.store.reader import HistoryReader
from treering.history.store.store import HistoryStore

FORMAT_1 = b"RINGHIST" + struct.pack("<II", 1, 30) + bytes(100)


def test_a_damaged_block_costs_that_prompt_alone_and_is_not_written_again(three: Path) -> None:
    victim = data_files(three)[1]
    data = bytearray(victim.read_bytes())
    data[data.index(np.array([-1, 4], np.int32).tobytes())] ^= 1
    victim.write_bytes(data)
    with HistoryStore(three) as store:
        assert len(store.snapshot) == 4
        with pytest.warns(UserWarning, match=rf"prompt 'c' in .*{victim.name} are left out: damaged") as warned:
            assert store.snapshot["c"].text.size == 0
        assert len(warned) == 1
        # Replacing b leaves the file less than half alive.
        store.add("b", [ids(9)], 9)
        store.add("b", [ids(9)], 10)
        store.publish()
    assert not victim.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sorted(contents(reopened(three))) == ["a", "b", "d"]


def test_new_rollouts_of_a_damaged_prompt_take_its_place(three: Path) -> None:
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
        (lambda data: data[:100] + b"?" + data[101:], "damaged in its header"),
        (lambda data: data[:60], "cut off or damaged in its header"),
        (lambda data: data[:20], "cut off"),
        (lambda data: b"", "cut off"),
        (lambda data: b"PK\3\4" + data, "no file of a history"),
        (lambda data: FORMAT_1, "of format 1, and this Treering reads format 3, which holds ready indexes"),
    ],
)
def test_a_damaged_file_costs_one_warning_that_names_it_and_the_rest_stays(
    three: Path, damage: Any, reason: str
) -> None:
    victim = data_files(three)[1]
    victim.write_bytes(damage(victim.read_bytes()))
    num_bytes = victim.stat().st_size
    expected = rf"{victim.name} is left out: {reason}.*its {num_bytes:,} bytes are lost"
    with pytest.warns(UserWarning, match=expected) as warned:
        store = HistoryStore(three)
    assert len(warned) == 1
    assert sorted(contents(store)) == ["a", "d"]
    store.add("b", [ids(7)], 4)
    store.publish()
    store.close()
    # It is left for a person to see, and no other file takes its name.
    assert victim.stat().st_size == num_bytes
    with pytest.warns(UserWarning, match=rf"{victim.name} is left out") as warned:
        assert_equal_snapshots(store, reopened(three))
    assert len(warned) == 1


def test_swapped_and_missing_files_cost_a_warning_each(three: Path) -> None:
    first, second, third = data_files(three)
    first.rename(three / "away")
    second.rename(first)
    (three / "away").rename(second)
    third.unlink()
    with pytest.warns(UserWarning, match="is left out") as warned:
        assert contents(reopened(three)) == {}
    messages = sorted(str(each.message) for each in warned)
    assert len(messages) == 3
    for message, file, reason in zip(
        messages, (first, second, third), ("another file", "another", "No such"), strict=True
    ):
        assert f"{file} is left out: {reason}" in message


@pytest.mark.parametrize("damage", [None, b"", b"garbage" * 9, "flip", "cut"])
def test_without_its_manifest_a_folder_gives_the_last_of_every_prompt(three: Path, damage: Any) -> None:
    file = three / MANIFEST
    data = file.read_bytes()
    damaged = {"flip": data[:70] + b"?" + data[71:], "cut": data[:-1]}.get(damage, damage)
    file.unlink() if damaged is None else file.write_bytes(damaged)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        reader = HistoryReader(three)
        assert not reader.refresh()
    # A reader waits for a writer to put it right; where there is no manifest, nothing was published.
    assert len(warned) == (damage is not None)
    assert contents(reader) == {}
    message = rf"{MANIFEST} cannot be used: .*every history file in the folder is used"
    with pytest.warns(UserWarning, match=message) as warned:
        store = reopened(three)
    assert len(warned) == 1
    assert sorted(contents(store)) == ["a", "b", "c", "d"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal_snapshots(store, reopened(three))
        assert reader.refresh()
        assert_equal_snapshots(store, reader)


def test_files_found_without_a_manifest_may_disagree_about_places(tmp_path: Path) -> None:
    index = blocks.PromptIndex.build({0: np.array([-1, 5], np.int32)})
    for number, prompt_id in enumerate(["a", 7, "b"]):
        parts, _ = blocks.encode(number, [(prompt_id, number // 2, index)])
        files.write_whole(manifest.data_file(tmp_path, number), parts)
    with pytest.warns(UserWarning, match="No such file"):
        # Two of the three are as old as each other, and all have to leave.
        store = reopened(tmp_path, max_bytes=50)
    assert contents(store) == {"b": {0: [-1, 5]}}
    assert_equal_snapshots(store, reopened(tmp_path))


def test_a_foreign_file_costs_one_warning_and_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, {"a": [1]})
    foreign = tmp_path / "notes.txt"
    foreign.write_text("mine")
    (tmp_path / ".hidden").write_text("mine")
    with pytest.warns(UserWarning, match=r"notes.txt is no file of this history") as warned:
        store = reopened(tmp_path)
    assert len(warned) == 1
    assert contents(store) == {"a": {0: [-1, 1]}}
    assert foreign.read_text() == (tmp_path / ".hidden").read_text() == "mine"
