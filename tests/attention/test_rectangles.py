"""The calls of a forest cover every visible pair exactly once and waste little."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forests import SHAPES, bushy, comb, reversed_comb, sequence_sets, star
from treering.attention import rectangles
from treering.attention.rectangles import ForestCalls, Visibility, forest_calls
from treering.tree.forest import Forest
from treering.tree.partition import QueryRanges


def calls_of(forest: Forest, window: int | None = None) -> ForestCalls:
    return forest_calls(QueryRanges.within(forest), forest.segment_start, window)


def visible_pairs(forest: Forest, window: int | None = None) -> np.ndarray:
    pairs = np.zeros((forest.num_tokens, forest.num_tokens), int)
    for query in range(forest.num_tokens):
        key = query
        while key >= 0 and (window is None or pairs[query].sum() < window):
            pairs[query, key] = 1
            key = int(forest.parent[key])
    return pairs


def covered_pairs(forest: Forest, window: int | None = None) -> np.ndarray:
    pairs = np.zeros((forest.num_tokens, forest.num_tokens), int)
    calls = calls_of(forest, window)
    ranges = QueryRanges.within(forest)
    for call in (*calls.within, *calls.across):
        rows = np.arange(call.query_start, call.query_stop)
        seen = call.mask(ranges, ranges.position)
        if call.visibility is Visibility.FULL:
            assert seen.all()
        if call.visibility is Visibility.CAUSAL:
            assert (seen == np.tri(*seen.shape, dtype=bool)).all()
        assert seen.any(1).all(), "a row without a key has no softmax"
        pairs[np.ix_(rows, call.key_indices())] += seen
    return pairs


@given(sequence_sets(max_extra=60))
def test_calls_cover_every_visible_pair_exactly_once(sequences: list[list[int]]) -> None:
    forest = Forest.from_sequences(sequences)
    assert (covered_pairs(forest) == visible_pairs(forest)).all()


@pytest.mark.parametrize(("causal_tokens", "block_tokens"), [(2, 3), (3, 8), (6, 6), (20, 20)])
@pytest.mark.parametrize("wasted_pairs", [0, 3, 2048])
@given(sequences=sequence_sets(max_sequences=12))
@settings(max_examples=25)
def test_small_blocks_cover_every_visible_pair_exactly_once(
    causal_tokens: int, block_tokens: int, wasted_pairs: int, sequences: list[list[int]]
) -> None:
    forest = Forest.from_sequences(sequences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rectangles, "MIN_CAUSAL_TOKENS", causal_tokens)
        patch.setattr(rectangles, "MAX_BLOCK_TOKENS", block_tokens)
        patch.setattr(rectangles, "MAX_WASTED_PAIRS", wasted_pairs)
        assert (covered_pairs(forest) == visible_pairs(forest)).all()


@given(sequences=sequence_sets(max_extra=60), window=st.integers(1, 70))
def test_calls_cover_every_pair_within_a_window_exactly_once(sequences: list[list[int]], window: int) -> None:
    forest = Forest.from_sequences(sequences)
    assert (covered_pairs(forest, window) == visible_pairs(forest, window)).all()


@pytest.mark.parametrize("window", [None, 2, 45, 100])
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_covered_exactly_once(name: str, window: int | None) -> None:
    forest = Forest.from_sequences(SHAPES[name])
    assert (covered_pairs(forest, window) == visible_pairs(forest, window)).all()


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("sequences", [comb(2000), reversed_comb(2000), star(2000), bushy(200)])
def test_masks_take_memory_linear_in_tokens(sequences: list[list[int]], window: int | None) -> None:
    forest = Forest.from_sequences(sequences)
    calls = calls_of(forest, window)
    masked = [call for call in (*calls.within, *calls.across) if call.visibility is Visibility.MASKED]
    entries = sum((call.query_stop - call.query_start) * call.key_indices().size for call in masked)
    assert entries <= 600 * forest.num_tokens


@given(sequence_sets(max_extra=60))
def test_within_calls_hold_each_query_once(sequences: list[list[int]]) -> None:
    forest = Forest.from_sequences(sequences)
    rows = [row for call in calls_of(forest).within for row in range(call.query_start, call.query_stop)]
    assert rows == list(range(forest.num_tokens))


@pytest.mark.parametrize(
    "sequences", [comb(1000), reversed_comb(1000), star(1000)], ids=["comb", "reversed comb", "star"]
)
def test_tiny_segments_are_batched_into_few_calls_with_bounded_waste(sequences: list[list[int]]) -> None:
    forest = Forest.from_sequences(sequences)
    calls = calls_of(forest)
    every = (*calls.within, *calls.across)
    assert len(every) <= forest.num_tokens / 8
    area = sum((call.query_stop - call.query_start) * call.key_indices().size for call in every)
    pairs = int(forest.position.astype(np.int64).sum()) + forest.num_tokens
    assert area <= pairs + len(calls.across) * 2048 + 128 * forest.num_tokens


def test_a_prompt_with_two_responses_takes_three_causal_calls_and_one_unmasked() -> None:
    forest = Forest.from_sequences([[1] * 40 + [2] * 50, [1] * 40 + [3] * 50])
    calls = calls_of(forest)
    assert [(c.query_start, c.query_stop, c.visibility) for c in calls.within] == [
        (0, 40, Visibility.CAUSAL),
        (40, 90, Visibility.CAUSAL),
        (90, 140, Visibility.CAUSAL),
    ]
    (later,) = calls.across
    assert (later.query_start, later.query_stop, later.key_start, later.key_stop) == (40, 140, 0, 40)
    assert later.visibility is Visibility.FULL


def test_an_empty_forest_needs_no_call() -> None:
    calls = calls_of(Forest.from_sequences([]))
    assert (calls.within, calls.across) == ((), ())
