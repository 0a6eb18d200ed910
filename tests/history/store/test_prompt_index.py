"""A prompt's text and sorted positions equal plain Python's; no context crosses into another rollout."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.history.store.prompt_index import MARKER, PromptIndex, as_text

ROLLOUTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=5)
VERSIONS = st.dictionaries(st.integers(0, 4), ROLLOUTS, min_size=1, max_size=3)
SORT_DEPTH = 64
ARRAYS = ("text", "order", "versions", "starts")


def build(versions: dict[int, list[list[int]]]) -> PromptIndex:
    return PromptIndex.build({version: text_of(rollouts) for version, rollouts in versions.items()})


def text_of(rollouts: list[list[int]]) -> np.ndarray:
    return as_text([np.array(rollout, np.int32) for rollout in rollouts])


def sorted_positions(rollouts: list[list[int]], depth: int = SORT_DEPTH) -> list[int]:
    """Sort positions by their entry and the earlier ones of the same rollout, nearest first, then by position."""
    keys = []
    for rollout in rollouts:
        entries = [MARKER, *rollout]
        keys += [entries[: i + 1][::-1][:depth] for i in range(len(entries))]
    return sorted(range(len(keys)), key=lambda position: (keys[position], position))


@given(VERSIONS)
def test_positions_are_sorted_by_their_contexts_read_backwards_then_by_index(
    versions: dict[int, list[list[int]]],
) -> None:
    newest_first = [rollout for version in sorted(versions, reverse=True) for rollout in versions[version]]
    index = build(versions)
    assert index.text.tolist() == [entry for rollout in newest_first for entry in (MARKER, *rollout)]
    assert index.order.tolist() == sorted_positions(newest_first)
    assert index.order.dtype == index.text.dtype == np.int32


@pytest.mark.parametrize(
    "rollouts",
    [
        [[7]],
        [[7], [7], [7]],
        [[2**31 - 1, 0, 2**31 - 1]],
        [[7] * 200, [7] * 150 + [3]],  # contexts equal to the sorting depth are ordered by position
        [[3, *range(100, 163), 8], [2, *range(100, 163), 8]],  # differ only in the 65th entry: ordered by position
        [[3, *range(100, 162), 8], [2, *range(100, 162), 8]],  # differ in the 64th entry: ordered by it
        [[1, 2] * 40, [2, 1] * 40, [1, 1, 2] * 30],
    ],
)
def test_awkward_texts_are_sorted_as_far_as_promised(rollouts: list[list[int]]) -> None:
    assert build({0: rollouts}).order.tolist() == sorted_positions(rollouts)


@given(VERSIONS)
def test_versions_stand_newest_first_and_give_their_texts_back(versions: dict[int, list[list[int]]]) -> None:
    index = build(versions)
    assert index.versions.tolist() == sorted(versions, reverse=True)
    assert {v: text.tolist() for v, text in index.texts().items()} == {
        v: text_of(rollouts).tolist() for v, rollouts in versions.items()
    }
    assert index.num_tokens == sum(len(rollout) for rollouts in versions.values() for rollout in rollouts)


@given(VERSIONS)
def test_an_index_without_its_oldest_version_is_the_one_built_without_it(versions: dict[int, list[list[int]]]) -> None:
    rest = build(versions).without_oldest()
    versions.pop(min(versions))
    if not versions:
        assert rest is None
        return
    assert rest is not None
    expected = build(versions)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(rest, name), getattr(expected, name), strict=True)
        assert not getattr(rest, name).flags.writeable
        assert not getattr(expected, name).flags.writeable
    assert rest.num_bytes == sum(getattr(rest, name).nbytes for name in ARRAYS)
    for name in ("text", "order"):
        assert getattr(rest, name).base is None, "a view would keep what was evicted in memory"
