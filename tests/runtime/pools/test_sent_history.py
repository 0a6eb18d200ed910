"""A worker that is sent the history has what is published of the prompts that it needs, and little more."""

import pickle

import numpy as np
import pytest

from treering.history.store.store import HistoryStore
from treering.runtime.pools import worker_state as module
from treering.runtime.pools.worker_state import SentHistory
from treering.runtime.workers.step_engine import ReceivedHistory

NUM_PROMPTS, NUM_STEPS, PER_STEP = 12, 30, 3
MAX_LENGTH = 9


def filled(*prompt_ids: str) -> HistoryStore:
    """A store with one rollout of each prompt."""
    return published(HistoryStore(), *prompt_ids)


def published(store: HistoryStore, *prompt_ids: str) -> HistoryStore:
    """The store with another rollout of each prompt."""
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
    store, received = HistoryStore(max_bytes=600), ReceivedHistory()
    sent = SentHistory(store)
    most = 0
    for step in range(NUM_STEPS):
        sent.begin()
        needed = {f"q{number}" for number in rng.choice(NUM_PROMPTS, PER_STEP, replace=False)}
        for _ in range(2):
            received.take(pickle.loads(pickle.dumps(sent.changes(needed))))
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


def test_what_has_not_changed_is_not_sent_again() -> None:
    store = filled("q", "r")
    sent = SentHistory(store)
    assert set(sent.changes(["q", "r", "new"])) == {"q", "r"}
    assert sent.changes(["q", "r", "q"]) == {}
    published(store, "r")
    assert sent.changes(["q", "r"]) == {"r": store.snapshot["r"]}
    sent.begin()
    assert sent.changes(["q", "r"]) == {}


def test_the_finished_rollouts_of_a_step_come_with_the_next_one() -> None:
    store = filled("known", "other")
    sent = SentHistory(store)
    sent.changes(["known", "new"])
    published(store, "known", "new", "other")
    sent.begin()
    # Nobody else's: only prompts that the worker has sampled.
    assert sent.changes(["next"]) == {"known": store.snapshot["known"], "new": store.snapshot["new"]}
    published(store, "known")
    # Within a step, only the prompts that run are brought up to date.
    assert sent.changes(["next"]) == {}


def test_of_earlier_prompts_those_sent_first_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(*"abcd")
    # Each prompt has three entries.
    monkeypatch.setattr(module, "MAX_OTHER_ENTRIES", 7)
    sent = SentHistory(store)
    for prompt_id in "abc":
        sent.begin()
        assert sent.changes([prompt_id]) == {prompt_id: store.snapshot[prompt_id]}
    sent.begin()
    assert sent.changes(["d"]) == {"d": store.snapshot["d"], "a": None}
