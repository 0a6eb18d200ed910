"""A background reader sees publishes without being asked, and a reader in the caller's thread when it is."""

import time
from pathlib import Path

from tests.history.stores import ids
from treering.history.store.reader import BackgroundReader, HistoryReader
from treering.history.store.store import HistoryStore


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


def test_a_snapshot_stays_valid_after_close(tmp_path: Path) -> None:
    with HistoryStore(tmp_path) as store:
        store.add("q", [ids(1, 2)], version=0)
        store.publish()
        background = BackgroundReader(HistoryReader(tmp_path))
        background.start(interval_s=0.01)
        background.close()
    assert background.snapshot["q"].text.tolist() == [-1, 1, 2]
