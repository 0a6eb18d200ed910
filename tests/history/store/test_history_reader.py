"""Snapshots of a history, and readers next to a writer, which see only whole publishes."""

import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.history.stores import assert_equal_snapshots, contents, data_files, ids, reopened, write
from treering.history.store import history_reader
from treering.history.store.files import HistoryFile, read_file
from treering.history.store.history_reader import BackgroundReader, HistoryReader, Snapshot
from treering.history.store.prompt_index import PromptIndex
from treering.history.store.store import HistoryStore

CHANGES = st.lists(
    st.dictionaries(st.one_of(st.integers(0, 3000), st.sampled_from("abc")), st.booleans(), max_size=4), max_size=12
)


def index_of(token: int) -> PromptIndex:
    return PromptIndex.build({0: np.array([-1, token], np.int32)})


@given(CHANGES)
def test_every_state_is_the_dictionary_that_it_was_made_as(changes: list[dict[Any, bool]]) -> None:
    snapshot, model = Snapshot({}), {}
    states = []
    for number, change in enumerate(changes):
        # True puts a new index, False removes the prompt if present.
        applied = {key: index_of(number) if put else None for key, put in change.items() if put or key in model}
        snapshot = snapshot.changed(applied)
        for key, index in applied.items():
            if index is None:
                del model[key]
            else:
                model[key] = index
        states.append((snapshot, dict(model)))
    for state, expected in states:
        assert list(state.items()) == list(expected.items())
        assert len(state) == len(expected)
        assert "never" not in state


def add(store: HistoryStore, prompt_id: str, *tokens: int, version: int = 0) -> None:
    store.add(prompt_id, [ids(*tokens)], version)
    store.publish()


def test_a_reader_follows_what_is_published_and_only_that(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    reader = HistoryReader(folder)
    assert (len(reader.snapshot), reader.refresh()) == (0, False)
    with HistoryStore(folder, max_epochs=2, max_bytes=300) as store:
        assert not reader.refresh()
        for version in range(8):
            add(store, "ab"[version % 2], version, 1, 2, version=version)
            add(store, "c", version, version=version)
            before = reader.snapshot
            seen = contents(reader)
            assert reader.refresh()
            assert not reader.refresh()
            assert_equal_snapshots(store, reader)
            assert {p: {v: t.tolist() for v, t in index.texts().items()} for p, index in before.items()} == seen
            store.add("c", [ids(9)], version)
            assert not reader.refresh()
    assert_equal_snapshots(store, HistoryReader(folder))


def test_indexes_lie_in_the_file_and_stay_when_it_goes(tmp_path: Path) -> None:
    write(tmp_path / "h", {"a": [1, 2, 3], "b": [4]})
    reader = HistoryReader(tmp_path / "h")
    index = reader.snapshot["a"]
    assert index.text.base is not None
    shutil.rmtree(tmp_path / "h")
    assert not reader.refresh()
    assert index.text.tolist() == [-1, 1, 2, 3]
    # A prompt that was never read is available too.
    assert reader.snapshot["b"].text.tolist() == [-1, 4]
    write(tmp_path / "h", {"c": [5]})
    assert reader.refresh()
    assert contents(reader) == {"c": {0: [-1, 5]}}


WRITING = """
import sys
from pathlib import Path
import numpy as np
from treering.history.store.store import HistoryStore
store = HistoryStore(Path(sys.argv[1]), max_epochs=1)
for version in range(10**6):
    for prompt_id in ("a", "b", f"q{version % 50}"):
        store.add(prompt_id, [np.full(50 + version % 100, version, np.int32)], version)
    store.publish()
    if version == 0:
        print("published", flush=True)
"""


def test_next_to_a_writer_that_is_killed_every_snapshot_is_one_publish(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITING, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"published\n"
        reader, last, num_seen = HistoryReader(tmp_path), -1, 0
        while num_seen < 40:
            newest = int(reader.snapshot["a"].versions[0])
            assert contents(reader)["b"] == {newest: [-1] + [newest] * (50 + newest % 100)}
            # Each of the fifty others has the version of its last turn.
            others = {f"q{v % 50}": v for v in range(max(0, newest - 49), newest + 1)}
            assert {p: int(index.versions[0]) for p, index in reader.snapshot.items() if p[0] == "q"} == others
            assert newest >= last
            last = newest
            num_seen += reader.refresh()
        writer.kill()
    reader.refresh()
    assert_equal_snapshots(reopened(tmp_path, max_epochs=1), reader)


def test_a_reader_changes_no_file(tmp_path: Path) -> None:
    write(tmp_path, {"a": [1]})
    (tmp_path / ".unfinished-history-00000044.bin").write_bytes(b"half")
    before = [(name, (tmp_path / name).stat().st_mtime_ns) for name in sorted(os.listdir(tmp_path))]
    assert contents(HistoryReader(tmp_path)) == {"a": {0: [-1, 1]}}
    assert [(name, (tmp_path / name).stat().st_mtime_ns) for name in sorted(os.listdir(tmp_path))] == before


def test_a_publish_that_is_replaced_while_it_is_read_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HistoryStore(tmp_path) as store:
        add(store, "a", 1)
        num_publishes = 3

        def publish_first(*arguments: object) -> HistoryFile | None:
            nonlocal num_publishes
            if num_publishes:
                num_publishes -= 1
                add(store, "a", num_publishes)
            return read_file(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(history_reader, "read_file", publish_first)
        assert_equal_snapshots(HistoryReader(tmp_path), store)
        num_publishes = 10**9
        add(store, "b", 1)
        # If a writer always overtakes it, the reader returns its old snapshot instead of waiting.
        reader = HistoryReader(tmp_path)
        assert len(reader.snapshot) == 0
        num_publishes = 0
        assert reader.refresh()
        assert_equal_snapshots(reader, store)


def test_a_damaged_file_costs_one_warning_and_its_prompts(three: Path) -> None:
    damaged = data_files(three)[1]
    damaged.write_bytes(damaged.read_bytes()[:30])
    with pytest.warns(UserWarning, match=rf"{damaged.name} is dropped: cut off") as warned:
        reader = HistoryReader(three)
    assert len(warned) == 1
    assert sorted(reader.snapshot) == ["a", "d"]
    with pytest.warns(UserWarning, match="is dropped"):
        store = HistoryStore(three)
    add(store, "b", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reader.refresh()
    assert_equal_snapshots(reader, store)
    store.close()


def test_a_publish_is_seen_without_a_call(tmp_path: Path) -> None:
    with HistoryStore(tmp_path) as store, BackgroundReader(HistoryReader(tmp_path)) as background:
        background.start(interval_s=0.01)
        background.start(interval_s=0.01)
        store.add("q", [ids(1, 2)], version=0)
        store.publish()
        ends = time.monotonic() + 60
        while "q" not in background.snapshot and time.monotonic() < ends:
            time.sleep(0.01)
        assert background.snapshot["q"].text.tolist() == [-1, 1, 2]
