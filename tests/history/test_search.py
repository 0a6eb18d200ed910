"""A context's place in an order is the one that counting finds, with keys and however often entries repeat."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from treering.history.index import PromptIndex, as_text
from treering.history.search import KEY_BITS, MAX_LENGTH, first_behind, measure, write_keys

TOKENS = st.sampled_from([0, 1, 2, 2**31 - 1])
ROLLOUTS = st.lists(st.lists(TOKENS, max_size=40), min_size=1, max_size=8)


@njit
def found(text: np.ndarray, order: np.ndarray, keys: np.ndarray, start: int, context: np.ndarray, begin: int) -> int:
    """The compiled search, called from a compiled function as it is made for."""
    return int(first_behind(text, order, keys, start, context, begin))


@njit
def measured(text: np.ndarray, at: int, context: np.ndarray, begin: int) -> tuple[int, int]:
    """The compiled measure, likewise."""
    length, edit = measure(text, at, context, begin)
    return length, edit


def keys_of(text: np.ndarray, order: np.ndarray) -> np.ndarray:
    keys = np.zeros(-(-order.size >> KEY_BITS), np.int64)
    write_keys(text, order, keys)
    return keys


def read_backwards(text: np.ndarray, at: int) -> list[int]:
    """A place's entries back to its marker, no further than places are sorted by."""
    entries = []
    while len(entries) <= MAX_LENGTH:
        entries.append(int(text[at]))
        if text[at] == -1:
            break
        at -= 1
    return entries


def counted(text: np.ndarray, context: list[int]) -> int:
    """Places that stand before the context."""
    wanted = read_backwards(np.array([-1, *context]), len(context))
    return sum(read_backwards(text, at) < wanted for at in range(text.size))


@settings(max_examples=150, deadline=None)
@given(rollouts=ROLLOUTS, context=st.lists(TOKENS, max_size=12), prompt=st.lists(TOKENS, max_size=3))
def test_a_search_finds_how_many_places_stand_before_a_context(
    rollouts: list[list[int]], context: list[int], prompt: list[int]
) -> None:
    text = as_text([np.array(rollout, np.int32) for rollout in rollouts])
    index = PromptIndex.build({0: text})
    keys = keys_of(index.text, index.order)
    row = np.array([*prompt, *context], np.int32)
    assert found(index.text, index.order, keys, 0, row, len(prompt)) == counted(index.text, context)
    # The same within texts of several prompts, where this one's begins further on.
    joined = np.concatenate([np.array([-1, 1, 1], np.int32), index.text])
    assert found(joined, index.order, keys, 3, row, len(prompt)) == counted(index.text, context)


def test_keys_are_the_last_two_entries_of_every_sixteenth_place() -> None:
    text = as_text([np.array([5, 6] * 20, np.int32)])
    index = PromptIndex.build({0: text})
    keys = keys_of(index.text, index.order)
    assert keys.size == 3
    # 41 places: the marker; the 5 behind it, then 19 fives behind a 6; 20 sixes behind a 5.
    assert keys.tolist() == [-(1 << 32), (5 << 32) + 7, (6 << 32) + 6]


def test_a_match_is_measured_back_to_the_beginning_and_behind_one_edit() -> None:
    text = np.array([-1, 1, 2, 3, 4, 5], np.int32)
    whole = np.array([9, 9, 1, 2, 3, 4, 5], np.int32)
    # Five tokens and the marker, and 8 more because that is the whole context.
    assert measured(text, 5, whole, 2) == (5 + 1 + 8, 0)
    replaced = np.array([1, 2, 7, 4, 5], np.int32)
    # 4, 5 agree; but for the 7 so do 1, 2 and the marker.
    assert measured(text, 5, replaced, 0) == (2, 3)


def test_a_marker_is_no_token_that_may_be_left_out() -> None:
    # [9, 10] begins as the context ends; 5, 6, 7 before it are another rollout's.
    text = np.array([-1, 5, 6, 7, -1, 9, 10], np.int32)
    assert measured(text, 5, np.array([5, 6, 7, 8, 9], np.int32), 0) == (1, 0)


@settings(max_examples=150, deadline=None)
@given(rollouts=ROLLOUTS, context=st.lists(TOKENS, min_size=1, max_size=12))
def test_a_place_is_measured_as_if_its_rollout_stood_alone(rollouts: list[list[int]], context: list[int]) -> None:
    row = np.array(context, np.int32)
    text = as_text([np.array(rollout, np.int32) for rollout in rollouts])
    start = 0
    for rollout in rollouts:
        alone = as_text([np.array(rollout, np.int32)])
        for at in range(alone.size):
            assert measured(text, start + at, row, 0) == measured(alone, at, row, 0)
        start += alone.size


def test_a_context_with_numbers_that_are_no_tokens_agrees_no_further_than_the_text_goes_back() -> None:
    # Before the text's first entry a careless read would find its last one, which is what the context has there.
    length, _ = measured(np.array([-1, 5], np.int32), 1, np.array([7, 5, -1, 5], np.int32), 0)
    assert length == 2
