"""A prompt's text and its sorted suffixes equal plain Python's, and no suffix reads into another rollout."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treering.history.index import MAX_DEPTH, PromptIndex, as_text

ROLLOUTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=5)
VERSIONS = st.dictionaries(st.integers(0, 4), ROLLOUTS, min_size=1, max_size=3)


def build(versions: dict[int, list[list[int]]]) -> PromptIndex:
    return PromptIndex.build({version: text_of(rollouts) for version, rollouts in versions.items()})


def text_of(rollouts: list[list[int]]) -> np.ndarray:
    return as_text([np.array(rollout, np.int32) for rollout in rollouts])


def sorted_suffixes(rollouts: list[list[int]]) -> list[int]:
    """Places of the text of these rollouts by what follows in the own rollout, then by place."""
    keys = []
    for rollout in rollouts:
        entries = [-1, *rollout]
        keys += [entries[i : i + MAX_DEPTH] for i in range(len(entries))]
    return sorted(range(len(keys)), key=lambda place: (keys[place], place))


@given(VERSIONS)
def test_suffixes_are_sorted_by_the_rest_of_their_rollout_then_by_place(versions: dict[int, list[list[int]]]) -> None:
    newest_first = [rollout for version in sorted(versions, reverse=True) for rollout in versions[version]]
    index = build(versions)
    assert index.text.tolist() == [entry for rollout in newest_first for entry in (-1, *rollout)]
    assert index.suffixes.tolist() == sorted_suffixes(newest_first)


def test_suffixes_that_agree_as_far_as_is_sorted_stand_by_place() -> None:
    rollouts = [[7] * 200, [7] * 150 + [3]]
    assert build({0: rollouts}).suffixes.tolist() == sorted_suffixes(rollouts)


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
    for name in ("text", "suffixes", "versions", "starts"):
        np.testing.assert_array_equal(getattr(rest, name), getattr(expected, name), strict=True)
        assert not getattr(rest, name).flags.writeable
        assert not getattr(expected, name).flags.writeable
    assert rest.num_bytes == sum(a.nbytes for a in (rest.text, rest.suffixes, rest.versions, rest.starts))
    assert rest.text.base is None, "a view would keep what was evicted in memory"
