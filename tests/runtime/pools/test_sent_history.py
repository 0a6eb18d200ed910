"""A worker that is sent the history has what is published of the prompts that it needs, and little more."""

import pickle

import numpy as np
import pytest

from treering.history.store.store import HistoryStore
from treering.rl.drafting import DraftOptions
from treering.runtime.pools import sent_history as module
from treering.runtime.pools.sent_history import SentHistory
from treering.runtime.workers.draft_history import DraftHistory, ReceivedHistory

NUM_PROMPTS, NUM_STEPS, PER_STEP = 12, 30, 3
MAX_LENGTH = 9


def filled(*prompt_ids: str) -> HistoryStore:
    """A store with one rollout of each prompt."""
    store = HistoryStore()
    for prompt_id in prompt_ids:
        store.add(prompt_id, [np.array([5, 6], np.int32)], version=0)
    store.publish()
    return store


@pytest.mark.parametrize("max_others", [0, 20, 10**6])
def test_a_worker_has_the_published_history_of_the_prompts_that_it_needs(
    max_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_OTHER_ENTRIES", max_others)
    rng = np.random.default_rng(0)
    # The budget makes the store forget prompts too.
    store, sent, received = HistoryStore(max_bytes=600), SentHistory(), ReceivedHistory()
    most = 0
    for step in range(NUM_STEPS):
        sent.begin()
        needed = {f"q{number}" for number in rng.choice(NUM_PROMPTS, PER_STEP, replace=False)}
        for _ in range(2):
            received.take(pickle.loads(pickle.dumps(sent.changes(needed, store.snapshot))))
            for prompt_id in needed:
                published, held = store.snapshot.get(prompt_id), received.snapshot.get(prompt_id)
                assert (published is None) == (held is None)
                if published is not None and held is not None:
                    assert held.text.tolist() == published.text.tolist()
                    assert held.order.tolist() == published.order.tolist()
                    assert held.texts().keys() == published.texts().keys()
            others = sum(index.text.size for prompt_id, index in received.snapshot.items() if prompt_id not in needed)
            assert others <= max_others
            most = max(most, others)
            for prompt_id in needed:
                store.add(prompt_id, [rng.integers(1, 9, rng.integers(1, MAX_LENGTH)).astype(np.int32)], step)
            store.publish()
    # The bound keeps others that it has room for.
    assert (most > 0) == (max_others > 0)


def test_what_has_not_changed_is_sent_once_in_a_step() -> None:
    store, sent = filled("q", "r"), SentHistory()
    assert set(sent.changes(["q", "r", "new"], store.snapshot)) == {"q", "r"}
    assert sent.changes(["q", "r", "q"], store.snapshot) == {}
    store.add("r", [np.array([7], np.int32)], version=1)
    store.publish()
    assert sent.changes(["q", "r"], store.snapshot) == {"r": store.snapshot["r"]}


def test_history_that_is_gone_is_dropped_in_the_worker_too() -> None:
    store, sent = filled("q", "r"), SentHistory()
    sent.changes(["q", "r"], store.snapshot)
    assert sent.changes(["q"], {}) == {"q": None}
    sent.begin()
    assert sent.changes(["q", "r"], {}) == {"r": None}


def test_of_earlier_prompts_those_sent_first_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    store, sent = filled(*"abcd"), SentHistory()
    # Each prompt has three entries.
    monkeypatch.setattr(module, "MAX_OTHER_ENTRIES", 7)
    for prompt_id in "abc":
        sent.begin()
        sent.changes([prompt_id], store.snapshot)
    sent.begin()
    assert sent.changes(["d"], store.snapshot) == {"d": store.snapshot["d"], "a": None}
    # One that is needed again is sent anew, and is the last to go.
    sent.begin()
    assert sent.changes(["b"], store.snapshot) == {"b": store.snapshot["b"]}
    sent.begin()
    assert sent.changes(["a"], store.snapshot) == {"a": store.snapshot["a"], "c": None}


def test_every_change_is_a_new_snapshot_for_the_drafter() -> None:
    history, store = DraftHistory(None, DraftOptions()), filled("q")
    received = history._source
    before = received.snapshot
    history.take({"q": store.snapshot["q"]})
    during = received.snapshot
    history.take({"q": None})
    assert (len(before), len(during), len(received.snapshot)) == (0, 1, 0)
    assert during is not before
