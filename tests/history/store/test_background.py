"""Publishing in the background gives the same result as publishing directly, and loses neither rollouts nor errors."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from tests.history.stores import ADDS, assert_equal_snapshots, contents, ids
from treering.errors import StateError
from treering.history.store.prompt_index import PromptIndex
from treering.history.store.store import HistoryStore


@given(ADDS)
def test_after_waiting_the_snapshot_is_that_of_publish(adds: list[Any]) -> None:
    here, beside = HistoryStore(), HistoryStore()
    for prompt_id, version, rollouts, publishes in adds:
        for store in (here, beside):
            store.add(prompt_id, [np.array(rollout, np.int32) for rollout in rollouts], version)
        if publishes:
            here.publish()
            # Adds follow while this one may still run; the next publish waits.
            beside.publish_in_background()
    here.publish()
    beside.publish()
    assert_equal_snapshots(here, beside)
    assert here.num_bytes == beside.num_bytes


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Builds wait for this event."""
    event, build = threading.Event(), PromptIndex.build

    def build_when_allowed(*arguments: Any) -> PromptIndex:
        assert event.wait(30)
        return build(*arguments)

    monkeypatch.setattr(PromptIndex, "build", build_when_allowed)
    return event


def test_readers_see_the_old_snapshot_and_adds_go_on_meanwhile(held: threading.Event) -> None:
    store = HistoryStore()
    store.add("a", [ids(1)], 0)
    store.publish_in_background()
    before = store.snapshot
    assert contents(store) == {}
    store.add("a", [ids(2)], 0)
    held.set()
    store.wait()
    assert (contents(store), dict(before)) == ({"a": {0: [-1, 1]}}, {})
    store.publish()
    assert contents(store) == {"a": {0: [-1, 1, -1, 2]}}


@pytest.mark.parametrize("call", ["wait", "publish", "publish_in_background", "save", "close"])
def test_an_error_surfaces_once_at_the_next_call_and_nothing_is_lost(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HistoryStore()
    store.add("a", [ids(1)], 0)

    def fail(*_: object) -> PromptIndex:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(PromptIndex, "build", fail)
        store.publish_in_background()
        store.add("a", [ids(2)], 0)
        with pytest.raises(MemoryError, match="no room"):
            getattr(store, call)(*[tmp_path / "history.bin"] * (call == "save"))
    if call == "close":
        return
    assert contents(store) == {}
    store.save(tmp_path / "history.bin")
    store.publish()
    loaded = HistoryStore.load(tmp_path / "history.bin")
    loaded.publish()
    assert contents(store) == contents(loaded) == {"a": {0: [-1, 1, -1, 2]}}


def test_closing_ends_what_is_under_way_and_later_calls_are_refused(held: threading.Event, tmp_path: Path) -> None:
    with HistoryStore(tmp_path) as store:
        store.add("a", [ids(1)], 0)
        store.publish_in_background()
        held.set()
    assert contents(store) == {"a": {0: [-1, 1]}}
    for call in (store.publish, store.publish_in_background, lambda: store.add("a", [ids(1)], 0)):
        with pytest.raises(StateError, match="this history is closed; open it again"):
            call()
    with HistoryStore(tmp_path) as again:
        assert_equal_snapshots(store, again)
