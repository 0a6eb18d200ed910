"""The arena copies the running prompts' indexes unchanged, gives the position of each entry, and stays small."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.history.reference import store_of
from treering.history.match.published import Arena
from treering.history.store.prompt_index import MARKER

PROMPT = st.dictionaries(
    st.integers(0, 9),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=7),
    min_size=1,
    max_size=6,
)


def test_every_slot_holds_its_prompts_index_with_markers_behind_the_last() -> None:
    snapshot = store_of({p: {0: [[p, p + 1]] * (1 + p % 3)} for p in range(20)}).snapshot
    arena = Arena()
    for batch in ([0, 1], [1, 2, 2, "unknown"], [3, 0], list(range(20))):
        slots = arena.slots(batch, snapshot)
        spans = arena.spans[slots]
        for prompt_id, (start, size) in zip(batch, spans, strict=True):
            index = snapshot.get(prompt_id)
            assert size == (index.text.size if index else 0)
            if index:
                np.testing.assert_array_equal(arena.text[start : start + size], index.text)
                np.testing.assert_array_equal(arena.order[start : start + size], index.order)
        end = max(start + size for start, size in spans)
        assert arena.text[end] == MARKER
        assert arena.text.size > end
        assert arena.positions.size == arena.order.size


@given(PROMPT)
def test_every_entry_knows_its_position_in_its_rollout(versions: dict[int, list[Any]]) -> None:
    store = store_of({"q": versions}, max_epochs=9)
    arena = Arena()
    arena.slots(["q"], store.snapshot)
    rollouts = [tokens for version in sorted(versions, reverse=True) for tokens in versions[version]]
    expected = [position for tokens in rollouts for position in range(len(tokens) + 1)]
    assert arena.positions[: len(expected)].tolist() == expected


def test_prompts_that_are_gone_make_room() -> None:
    snapshot = store_of({p: {0: [[p] * 9]} for p in range(300)}).snapshot
    arena = Arena()
    for first in range(298):
        arena.slots([first, first + 1], snapshot)
    # Two prompts of 10 entries run; at most twice that and one more batch is ever held, doubled by growth.
    assert arena.order.size <= 2 * (2 * 20 + 20)
    for _ in range(300):
        arena.slots([f"unknown {_}"], snapshot)
    assert arena.spans.shape[0] <= 16


def test_a_new_snapshot_starts_over() -> None:
    arena = Arena()
    for num_tokens in (300, 2, 5):
        snapshot = store_of({"a": {0: [[num_tokens] * num_tokens]}}).snapshot
        (slot,) = arena.slots(["a"], snapshot)
        start, size = arena.spans[slot]
        assert arena.text[start : start + size].tolist() == [-1] + [num_tokens] * num_tokens
        # What the last snapshot left behind its end would be read as its continuation.
        assert arena.text[start + size] == MARKER


def test_what_forgot_goes_on_as_a_new_one_would() -> None:
    snapshot = store_of({p: {0: [[p] * (1 + p % 5)] * (1 + p % 3)} for p in range(40)}).snapshot
    rng = np.random.default_rng(0)
    used, new = Arena(), Arena()
    for _ in range(20):
        used.slots(rng.choice(40, 6).tolist(), snapshot)
    used.forget()
    for size in (3, 1, 2, 9, 4, 1, 1, 6, 2, 12, 5):
        batch = rng.choice(40, size).tolist()
        slots = used.slots(batch, snapshot)
        np.testing.assert_array_equal(slots, new.slots(batch, snapshot))
        np.testing.assert_array_equal(used.spans[slots], new.spans[slots])
        end = int(new.spans[slots].sum(axis=1).max())
        for name in ("text", "order", "positions"):
            np.testing.assert_array_equal(getattr(used, name)[:end], getattr(new, name)[:end])
        assert used.text[used.spans[slots].sum(axis=1).max()] == MARKER
