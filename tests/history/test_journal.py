"""A store's folder gives back what was published, stays small, and a damaged file costs one warning (law 7)."""

import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.history.test_store import assert_equal_snapshots, contents, ids
from treering.errors import InputError, StateError
from treering.history.files import Contents, decode, encode
from treering.history.store import HistoryStore

KILLED_WRITER = """
import os, sys
from pathlib import Path
import numpy as np
from treering.history import files
from treering.history.store import HistoryStore
files.os.replace = lambda *_: os._exit(9)
store = HistoryStore(Path(sys.argv[1]))
store.add("late", [np.array([1, 2, 3], np.int32)], 5)
store.publish()
"""


def write(folder: Path, *publishes: dict[str, list[int]], **options: int) -> HistoryStore:
    """A store in the folder; publish number i adds one rollout of version i per prompt."""
    store = HistoryStore(folder, **options)
    for version, rollouts in enumerate(publishes):
        for prompt_id, tokens in rollouts.items():
            store.add(prompt_id, [np.array(tokens, np.int32)], version)
        store.publish()
    return store


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def num_entries_on_disk(folder: Path) -> int:
    return sum(text.size for file in files_of(folder) for text in decode(file.read_bytes()).published.values())


def test_a_folder_gives_back_what_was_published(tmp_path: Path) -> None:
    store = write(tmp_path / "new" / "folder", {"a": [1, 2], "b": [3]}, {"a": [4]}, {"c": [5], "a": [6, 7]})
    assert_equal_snapshots(store, HistoryStore(tmp_path / "new" / "folder"))
    assert contents(store)["a"] == {2: [-1, 6, 7], 1: [-1, 4]}


def test_a_later_publish_of_the_same_version_keeps_the_order_of_adding_in_one_file(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path)
    for token in (5, 6, 7):
        store.add("a", [ids(token)], 0)
        store.publish()
        assert len(files_of(tmp_path)) == 1
    assert contents(store) == {"a": {0: [-1, 5, -1, 6, -1, 7]}}
    assert_equal_snapshots(store, HistoryStore(tmp_path))


def test_what_is_not_published_is_not_written(tmp_path: Path) -> None:
    store = write(tmp_path, {"a": [1]})
    store.add("b", [ids(2)], 0)
    assert contents(HistoryStore(tmp_path)) == {"a": {0: [-1, 1]}}


@pytest.mark.parametrize("budget", [1 << 30, 700])
def test_the_folder_stays_below_twice_what_is_alive(tmp_path: Path, budget: int) -> None:
    rng = np.random.default_rng(0)
    store = HistoryStore(tmp_path, max_epochs=2, max_bytes=budget)
    for version in range(40):
        for prompt_id in rng.choice(8, size=3, replace=False).tolist():
            store.add(prompt_id, [rng.integers(0, 9, rng.integers(1, 30)).astype(np.int32)], version)
        store.publish()
        num_alive = sum(index.text.size for index in store.snapshot.values())
        assert num_alive <= num_entries_on_disk(tmp_path) <= 2 * num_alive
        reopened = HistoryStore(tmp_path, max_epochs=2, max_bytes=1 << 30)
        for prompt_id, versions in contents(store).items():
            assert versions.items() <= contents(reopened)[prompt_id].items()
    assert len(files_of(tmp_path)) < 20


def test_opening_with_tighter_limits_keeps_the_newest_and_cleans_the_folder(tmp_path: Path) -> None:
    write(tmp_path, *({"a": [v, v, v]} for v in range(6)), max_epochs=6)
    store = HistoryStore(tmp_path, max_epochs=1)
    assert contents(store) == {"a": {5: [-1, 5, 5, 5]}}
    assert num_entries_on_disk(tmp_path) <= 8


def test_every_flipped_byte_and_every_cut_is_noticed() -> None:
    text = np.array([-1, 5, 6], np.int32)
    data = encode(Contents(published={("q", 3): text}, pending={(4, 0): text}))
    assert list(decode(data).published) == [("q", 3)]
    assert list(decode(data).pending) == [(4, 0)]
    for i in range(len(data)):
        damaged = bytearray(data)
        damaged[i] ^= 1 << (i % 8)
        with pytest.raises(InputError):
            decode(bytes(damaged))
        with pytest.raises(InputError):
            decode(data[:i])
    with pytest.raises(InputError):
        decode(data + b"\0")


def flipped(data: bytes) -> bytes:
    return data[:-50] + bytes([data[-50] ^ 4]) + data[-49:]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flipped, "damaged: its checksum differs"),
        (lambda data: data[: len(data) // 2], "damaged"),
        (lambda data: data[:20], "cut off"),
        (lambda data: b"", "no history file"),
        (lambda data: b"PK\3\4" + data, "no history file"),
        (lambda data: data[:8] + b"\2" + data[9:], "of format 2, and this Treering reads format 1"),
    ],
)
def test_a_damaged_file_costs_one_warning_that_names_it_and_the_rest_stays(
    tmp_path: Path, damage: Any, reason: str
) -> None:
    write(tmp_path, {"a": [1, 2]}, {"b": [3, 4]}, {"c": [5, 6]})
    victim = files_of(tmp_path)[1]
    victim.write_bytes(damage(victim.read_bytes()))
    num_bytes = victim.stat().st_size
    with pytest.warns(
        UserWarning, match=rf"{victim.name} is left out: {reason}.*{num_bytes:,} bytes are lost"
    ) as warned:
        store = HistoryStore(tmp_path)
    assert len(warned) == 1
    assert contents(store) == {"a": {0: [-1, 1, 2]}, "c": {2: [-1, 5, 6]}}
    store.add("b", [ids(7)], 4)
    store.publish()
    with pytest.warns(UserWarning, match=victim.name):
        assert_equal_snapshots(store, HistoryStore(tmp_path))


def test_a_damaged_newest_file_keeps_its_name(tmp_path: Path) -> None:
    write(tmp_path, {"a": [1]}, {"b": [2]})
    victim = files_of(tmp_path)[1]
    victim.write_bytes(b"?")
    with pytest.warns(UserWarning, match=victim.name):
        store = HistoryStore(tmp_path)
    store.add("c", [ids(3)], 2)
    store.publish()
    assert victim.read_bytes() == b"?"
    assert [file.name for file in files_of(tmp_path)] == [f"history-0000000{i}.bin" for i in range(3)]


def test_a_foreign_file_costs_one_warning_and_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, {"a": [1]})
    foreign = tmp_path / "notes.txt"
    foreign.write_text("mine")
    (tmp_path / ".hidden").write_text("mine")
    with pytest.warns(UserWarning, match="notes.txt is no file of this history") as warned:
        store = HistoryStore(tmp_path)
    assert len(warned) == 1
    assert contents(store) == {"a": {0: [-1, 1]}}
    assert foreign.read_text() == "mine"


def test_a_killed_writer_leaves_what_was_there_and_its_rest_is_cleared(tmp_path: Path) -> None:
    store = write(tmp_path, {"a": [1]})
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path)], timeout=120, check=False)
    assert done.returncode == 9
    assert [file.name.startswith(".unfinished-") for file in files_of(tmp_path)] == [True, False]
    assert_equal_snapshots(store, HistoryStore(tmp_path))
    assert [file.name for file in files_of(tmp_path)] == ["history-00000000.bin"]


def test_files_that_a_killed_cleaner_left_change_nothing(tmp_path: Path) -> None:
    folder, copy = tmp_path / "history", tmp_path / "copy"
    store = HistoryStore(folder, max_epochs=1)
    for version in range(4):
        store.add("a", [ids(version, 1, 2)], version)
        store.add("a" if version % 2 else "b", [ids(version)], version)
        store.publish()
        shutil.copytree(folder, copy, dirs_exist_ok=True)
    assert len(files_of(copy)) > len(files_of(folder))
    assert contents(HistoryStore(copy, max_epochs=1)) == contents(store)


def test_a_folder_that_cannot_be_written_costs_one_warning_and_is_written_later(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    store = write(folder, {"a": [1]})
    shutil.move(folder, tmp_path / "away")
    folder.write_text("in the way")
    store.add("b", [ids(2)], 1)
    with pytest.warns(UserWarning, match="could not be written to .*history") as warned:
        store.publish()
    assert len(warned) == 1
    assert contents(store) == {"a": {0: [-1, 1]}, "b": {1: [-1, 2]}}
    folder.unlink()
    shutil.move(tmp_path / "away", folder)
    store.add("c", [ids(3)], 2)
    store.publish()
    assert_equal_snapshots(store, HistoryStore(folder))


def test_a_path_that_is_no_folder_is_refused_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StateError, match="give another path, or None"):
            HistoryStore(path)


def test_opening_an_untouched_folder_writes_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"a": [1, 2]}, {"a": [3]})
    before = [(file.name, file.stat().st_mtime_ns) for file in files_of(tmp_path)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HistoryStore(tmp_path)
    assert [(file.name, file.stat().st_mtime_ns) for file in files_of(tmp_path)] == before
