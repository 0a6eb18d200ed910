"""The working copy of the running prompts' indexes holds them as they are, says what each place is, and stays small."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.history.reference import store_of
from treering.history.features import NUM_AGES
from treering.history.match.arena import NOTE_BITS, SAID_BITS, Arena
from treering.history.store.prompt_index import MARKER

PROMPT = st.dictionaries(
    st.integers(0, 9),
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.sampled_from([-1.0, 0.0, 2.5])),
        min_size=1,
        max_size=7,
    ),
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
        assert arena.about.size == arena.order.size


def described(
    versions: dict[int, list[Any]], *, has_rewards: bool
) -> tuple[Arena, list[tuple[int, int, int, int, float]]]:
    """An arena with one prompt, and for each of its places what it should say."""
    store = store_of(
        {"q": {v: [tokens for tokens, _ in rollouts] for v, rollouts in versions.items()}},
        rewards={"q": {v: [reward for _, reward in rollouts] for v, rollouts in versions.items()}}
        if has_rewards
        else None,
        max_epochs=9,
    )
    arena = Arena(rewards="read")
    arena.slots(["q"], store.snapshot)
    known = [reward for rollouts in versions.values() for _, reward in rollouts]
    mean = np.float32(np.mean(np.array(known, np.float32)))
    expected = []
    for age, version in enumerate(sorted(versions, reverse=True)):
        newer_versions = sum(len(versions[v]) for v in versions if v > version)
        for k, (tokens, reward) in enumerate(versions[version]):
            # Within a version later ones are newer.
            num_newer = newer_versions + len(versions[version]) - 1 - k
            recent = 0 if num_newer == 0 else 1 if num_newer == 1 else 2 if num_newer <= 3 else 3
            reward_class = 0 if not has_rewards else 2 if np.float32(reward) >= mean else 1
            for depth in range(len(tokens) + 1):
                expected.append((depth, min(age, NUM_AGES - 1), reward_class, recent, reward if has_rewards else 0.0))
    return arena, expected


@given(PROMPT, st.booleans())
def test_every_place_knows_its_depth_age_reward_and_newness(versions: dict[int, list[Any]], has_rewards: bool) -> None:
    arena, expected = described(versions, has_rewards=has_rewards)
    size = len(expected)
    notes = arena.about[:size].astype(int) % (1 << NOTE_BITS)
    found = zip(
        (arena.about[:size] >> NOTE_BITS).tolist(),
        (notes % NUM_AGES).tolist(), (notes % (1 << SAID_BITS) // NUM_AGES).tolist(), (notes >> SAID_BITS).tolist(),
        arena.rewards[:size].tolist(), strict=True,
    )  # fmt: skip
    assert list(found) == expected


def test_rewards_take_no_room_where_nobody_reads_them() -> None:
    snapshot = store_of({"q": {0: [[1, 2]]}}, rewards={"q": {0: [2.5]}}).snapshot
    sizes = {}
    for rewards in ("read", "unread"):
        arena = Arena(rewards=rewards)  # type: ignore[arg-type]
        arena.slots(["q"], snapshot)
        sizes[rewards] = arena.rewards.size
        assert arena.num_bytes == sum(
            a.nbytes for a in (arena.text, arena.order, arena.keys, arena.about, arena.rewards, arena.spans)
        )
    assert sizes["read"] >= 3
    assert sizes["unread"] == 0


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


def test_places_that_moved_are_told_by_the_generation() -> None:
    store = store_of({p: {0: [[p] * 9]} for p in range(30)})
    arena = Arena()
    kept: dict[int, tuple[int, int]] = {}
    generation = -1
    for first in range(29):
        slots = arena.slots([first, first + 1], store.snapshot)
        if arena.generation != generation:
            kept, generation = {}, arena.generation
        spans = [tuple(arena.spans[slot].tolist()) for slot in slots]
        for prompt_id, span in zip((first, first + 1), spans, strict=True):
            assert kept.setdefault(prompt_id, span) == span
    assert generation > 1
    before = arena.generation
    arena.slots([28, 29], store.snapshot)
    assert arena.generation == before
    store.publish()
    store.add(1, [np.array([5], np.int32)], 1)
    store.publish()
    arena.slots([28, 29], store.snapshot)
    assert arena.generation > before


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
    used, new = Arena(rewards="read"), Arena(rewards="read")
    for _ in range(20):
        used.slots(rng.choice(40, 6).tolist(), snapshot)
    before = used.generation
    used.forget()
    assert used.generation > before, "places that were kept mean nothing any more"
    first = used.generation - new.generation
    for size in (3, 1, 2, 9, 4, 1, 1, 6, 2, 12, 5):
        batch = rng.choice(40, size).tolist()
        slots = used.slots(batch, snapshot)
        np.testing.assert_array_equal(slots, new.slots(batch, snapshot))
        np.testing.assert_array_equal(used.spans[slots], new.spans[slots])
        # Both make room at the same moments.
        assert used.generation - new.generation == first
        end = int(new.spans[slots].sum(axis=1).max())
        for name in ("text", "order", "about", "rewards"):
            np.testing.assert_array_equal(getattr(used, name)[:end], getattr(new, name)[:end])
        assert used.text[used.spans[slots].sum(axis=1).max()] == MARKER
