"""A store's folder returns what was published, stays small and is written in small parts."""

import gc
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.history.stores import (
    assert_equal_snapshots,
    contents,
    data_files,
    ids,
    large,
    num_bytes_on_disk,
    reopened,
    write,
)
from treering.errors import StateError
from treering.history.store import store as store_module
from treering.history.store.files import StoredIndex
from treering.history.store.history_reader import HistoryReader
from treering.history.store.prompt_index import PromptIndex
from treering.history.store.store import HistoryStore


def test_a_folder_gives_back_what_was_published_in_the_same_order(tmp_path: Path) -> None:
    store = write(tmp_path / "new" / "folder", {"a": [1, 2], "b": [3]}, {"a": [4]}, {"c": [5], "a": [6, 7], "b": [8]})
    again = reopened(tmp_path / "new" / "folder")
    assert_equal_snapshots(store, again)
    assert (again.num_bytes, again.num_tokens) == (store.num_bytes, store.num_tokens)
    assert contents(store)["a"] == {2: [-1, 6, 7], 1: [-1, 4]}


def test_opening_reads_no_rollout_and_builds_nothing(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredIndex, "index", property(lambda _: pytest.fail("read")))
    monkeypatch.setattr(PromptIndex, "build", lambda *_: pytest.fail("built"))
    with HistoryStore(three) as store:
        assert (len(store.snapshot), store.num_tokens) == (4, 360_003)
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


def test_a_file_is_merged_into_the_first_publish_that_is_as_large(three: Path) -> None:
    last = data_files(three)[2]
    with HistoryStore(three) as store:
        store.add("e", [ids(*large(7))], 3)
        store.publish()
    # The first two files are as large as the new one, which also replaces the third.
    assert [file.name for file in data_files(three)] == ["history-00000003.bin"]
    assert not last.exists()
    assert_equal_snapshots(store, reopened(three))


def test_a_prompt_that_was_dropped_and_came_back_has_its_new_place_in_files_too(tmp_path: Path) -> None:
    """In bytes, b takes 8 * 200,001 + 24; a, c and d are small."""
    with HistoryStore(tmp_path, max_bytes=1_600_120) as store:
        for version, (prompt_id, tokens) in enumerate(
            [("a", ids(1)), ("b", ids(*large(2))), ("c", ids(3)), ("d", ids(4)), ("a", ids(5))]
        ):
            store.add(prompt_id, [tokens], version if prompt_id != "b" else 9)
            store.publish()
        assert list(store.snapshot) == ["b", "d", "a"]
    assert_equal_snapshots(store, reopened(tmp_path))


@pytest.mark.parametrize("budget", [1 << 30, 900])
def test_the_folder_stays_below_twice_what_is_alive_and_is_the_store(
    tmp_path: Path, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_SLACK_BYTES", 300)
    rng = np.random.default_rng(0)
    reader = HistoryReader(tmp_path)
    with HistoryStore(tmp_path, max_epochs=2, max_bytes=budget) as store:
        for version in range(40):
            for prompt_id in rng.choice(8, size=3, replace=False).tolist():
                store.add(prompt_id, [rng.integers(0, 9, rng.integers(1, 30)).astype(np.int32)], version)
            store.publish()
            # Headers have about 50 bytes per prompt and 60 per file.
            most = 2 * store.num_bytes + 300 + 60 * (2 * len(store.snapshot) + len(data_files(tmp_path)))
            assert store.num_bytes <= num_bytes_on_disk(tmp_path) <= most
            assert len(data_files(tmp_path)) <= 6
            assert reader.refresh()
            assert_equal_snapshots(store, reader)
    assert_equal_snapshots(store, reopened(tmp_path, max_epochs=2, max_bytes=budget))


def test_opening_with_tighter_limits_keeps_the_newest_and_cleans_the_folder(tmp_path: Path) -> None:
    write(tmp_path, *({"a": [v, v, v]} for v in range(6)), max_epochs=6)
    store = reopened(tmp_path, max_epochs=1)
    assert contents(store) == {"a": {5: [-1, 5, 5, 5]}}
    assert store.num_bytes == 4 * 8 + 16 + 8
    assert len(data_files(tmp_path)) == 1
    assert contents(reopened(tmp_path, max_bytes=1)) == contents(HistoryReader(tmp_path)) == {}


def test_a_path_that_is_not_a_folder_is_refused_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StateError, match="choose another path, or None"):
            HistoryStore(path)


HOLDER = """
import sys, time
from pathlib import Path
from treering.history.store.store import HistoryStore
store = HistoryStore(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""
REFUSED = "one HistoryStore at a time may write a folder, and .* close that, .* HistoryReader"


def in_a_fork(work: Callable[[], None]) -> bool:
    """Return whether `work` succeeds in a forked process."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_second_store_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path)
    with pytest.raises(StateError, match=REFUSED):
        HistoryStore(tmp_path)
    store.close()
    store.close()
    HistoryStore(tmp_path).close()


def test_a_store_that_is_collected_gives_its_folder_free(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path)
    with pytest.raises(StateError, match=REFUSED):
        HistoryStore(tmp_path)
    del store
    gc.collect()
    with HistoryStore(tmp_path) as another:
        assert len(another.snapshot) == 0


def test_another_process_is_refused_until_the_holder_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StateError, match=REFUSED):
            HistoryStore(tmp_path)
        holder.send_signal(signal.SIGKILL)
        holder.wait(30)
        HistoryStore(tmp_path).close()


def test_a_forked_copy_cannot_publish_and_does_not_keep_the_lock(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path)

    def publish() -> None:
        store.add("a", [ids(1)], 0)
        with pytest.raises(StateError, match=rf"written by process {os.getppid()}, .* forked from it; publish there"):
            store.publish()

    assert in_a_fork(publish)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go[1])  # so that the child ends with this process
        os.write(ready[1], b"1")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    store.close()
    HistoryStore(tmp_path).close()  # although the forked copy lives
    os.write(go[1], b"1")
    os.waitpid(child, 0)
    for end in (*ready, *go):
        os.close(end)


def test_a_copy_that_closes_does_not_give_the_folder_free(tmp_path: Path) -> None:
    with HistoryStore(tmp_path) as store:
        assert in_a_fork(store.close)
        with pytest.raises(StateError, match=REFUSED):
            HistoryStore(tmp_path)
