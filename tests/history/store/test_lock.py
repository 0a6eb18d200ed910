"""One store at a time writes a folder, and the lock ends with the process that holds it, however that ends."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.history.stores import ids
from treering.errors import StateError
from treering.history.store.journal import WriterLock
from treering.history.store.store import HistoryStore

HOLDER = """
import sys, time
from pathlib import Path
from treering.history.store.journal import WriterLock
lock = WriterLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""
REFUSED = "one HistoryStore at a time writes a folder, and .* close it, .* HistoryReader"


def in_a_fork(work: Callable[[], None]) -> bool:
    """Whether a forked process does the work without an error."""
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
        assert another.num_prompts == 0


def test_another_process_is_refused_until_the_holder_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StateError, match=REFUSED):
            HistoryStore(tmp_path)
        holder.send_signal(signal.SIGKILL)
        holder.wait(30)
        HistoryStore(tmp_path).close()


def test_a_forked_copy_cannot_publish_and_does_not_keep_the_claim(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path)

    def publish() -> None:
        store.add("a", [ids(1)], 0)
        with pytest.raises(StateError, match=rf"written by process {os.getppid()}, .* forked from it; publish there"):
            store.publish()

    assert in_a_fork(publish)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go[1])  # so that it ends with this process, however that ends
        os.write(ready[1], b"1")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    store.close()
    HistoryStore(tmp_path).close()  # although the copy lives
    os.write(go[1], b"1")
    os.waitpid(child, 0)
    for end in (*ready, *go):
        os.close(end)


def test_a_copy_that_closes_does_not_give_the_folder_free(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    assert in_a_fork(lock.release)
    with pytest.raises(StateError, match=REFUSED):
        WriterLock(tmp_path)
    lock.check()
    lock.release()
    with pytest.raises(StateError, match="is closed; open it again"):
        lock.check()
