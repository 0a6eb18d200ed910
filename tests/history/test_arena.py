"""The working copy of the running prompts' indexes holds them as they are, and stays small."""

import numpy as np

from tests.history.reference import store_of
from treering.history.arena import Arena
from treering.history.index import MARKER, MAX_DEPTH


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
                np.testing.assert_array_equal(arena.suffixes[start : start + size], index.suffixes)
        end = max(start + size for start, size in spans)
        assert arena.text[end] == MARKER
        assert arena.text.size >= end + MAX_DEPTH


def test_prompts_that_are_gone_make_room() -> None:
    snapshot = store_of({p: {0: [[p] * 9]} for p in range(300)}).snapshot
    arena = Arena()
    for first in range(298):
        arena.slots([first, first + 1], snapshot)
    # Two prompts of 10 entries run; at most twice that and one more batch is ever held, doubled by growth.
    assert arena.suffixes.size <= 2 * (2 * 20 + 20)
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
        assert (arena.text[start + size : start + size + MAX_DEPTH] == MARKER).all()
