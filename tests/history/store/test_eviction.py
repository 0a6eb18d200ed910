"""Over many publishes, eviction drops what a search through the whole store would drop."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treering.history.store.store import HistoryStore

ADDS = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.integers(0, 6), st.integers(1, 6), st.booleans()), min_size=1, max_size=40
)
Model = dict[Any, dict[int, list[int]]]


def num_bytes_of(model: Model) -> int:
    """8 bytes an entry, 16 a version and 8 a prompt."""
    return sum(8 + sum(16 + 8 * len(text) for text in versions.values()) for versions in model.values())


def evict(model: Model, budget: int) -> None:
    while num_bytes_of(model) > budget:
        # min takes the first of equals: prompts stand in the order in which they came.
        oldest = min(model, key=lambda prompt: min(model[prompt]))
        del model[oldest][min(model[oldest])]
        if not model[oldest]:
            del model[oldest]


@given(ADDS, st.integers(40, 600))
def test_the_store_keeps_what_a_search_through_all_of_it_keeps(adds: list[Any], budget: int) -> None:
    store, model, pending = HistoryStore(max_bytes=budget, max_epochs=2), {}, {}
    for number, (prompt, version, size, publishes) in enumerate(adds):
        store.add(prompt, [np.full(size, number, np.int32)], version)
        pending.setdefault(prompt, []).append((version, [-1, *[number] * size]))
        if not publishes:
            continue
        store.publish()
        for name, texts in pending.items():
            versions = model.setdefault(name, {})
            for at, text in texts:
                versions[at] = versions.get(at, []) + text
            model[name] = {at: versions[at] for at in sorted(versions, reverse=True)[:2]}
        pending = {}
        evict(model, budget)
        kept = {p: {v: t.tolist() for v, t in index.texts().items()} for p, index in store.snapshot.items()}
        assert list(kept.items()) == list(model.items())
        assert store.num_bytes == num_bytes_of(model)


def test_a_prompt_that_comes_back_has_lost_its_old_place() -> None:
    """Bytes: a is 40, then 56 with two rollouts; b is 176; c is 40."""
    store = HistoryStore(max_bytes=230)
    for prompt, num_tokens in (("a", 1), ("a", 1), ("b", 18), ("a", 1)):
        store.add(prompt, [np.ones(num_tokens, np.int32)], 0)
        store.publish()
    assert list(store.snapshot) == ["b", "a"]
    store.add("c", [np.ones(1, np.int32)], 0)
    store.publish()
    assert list(store.snapshot) == ["a", "c"]
