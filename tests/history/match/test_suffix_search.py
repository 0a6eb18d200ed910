"""A search finds the same position as counting, with keys and with repeated entries."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from treering.history.match.matches import MAX_LENGTH, measure
from treering.history.match.published import (
    BATCHED_SEARCH,
    MAX_QUERIES,
    Arena,
    BatchedSearch,
    Histories,
    Others,
    Recent,
    add_history_query,
    add_query,
    last_with_key,
    run_queries,
)
from treering.history.store.prompt_index import PromptIndex, as_text

TOKENS = st.sampled_from([0, 1, 2, 2**31 - 1])
ROLLOUTS = st.lists(st.lists(TOKENS, max_size=40), min_size=1, max_size=8)


@njit
def found_in_history(
    rows: np.ndarray, tokens: np.ndarray, ends: np.ndarray, begins: np.ndarray, prompts: np.ndarray, history: Histories,
    queries: BatchedSearch,
) -> np.ndarray:  # fmt: skip
    """Search the rows' prompt histories from compiled code."""
    for q in range(rows.size):
        b = rows[q]
        add_history_query(queries, q, tokens, b, ends[b], begins[b], history, prompts[b])
    run_queries(queries, rows.size, tokens, history.text, history.order, history.keys, history.positions)
    return queries.lows


@njit
def found_in_others(
    rows: np.ndarray, tokens: np.ndarray, ends: np.ndarray, begins: np.ndarray, others: Others, queries: BatchedSearch
) -> np.ndarray:
    """Search other prompts' histories from compiled code."""
    for q in range(rows.size):
        add_query(queries, q, tokens, rows[q], ends[rows[q]], begins[rows[q]], 0, others.order.size, 0)
    run_queries(queries, rows.size, tokens, others.text, others.order, others.keys, others.text)
    return queries.lows


@njit
def measured(text: np.ndarray, at: int, context: np.ndarray, begin: int) -> tuple[int, int]:
    """Call the compiled `measure` from compiled code."""
    length, edit = measure(text, at, context, begin)
    return length, edit


def read_backwards(text: np.ndarray, at: int) -> list[int]:
    """Read a position's entries back to its marker, at most as far as positions are sorted."""
    entries = []
    while len(entries) <= MAX_LENGTH:
        entries.append(int(text[at]))
        if text[at] == -1:
            break
        at -= 1
    return entries


def counted(text: np.ndarray, context: list[int]) -> int:
    """Count the positions that sort before the context."""
    wanted = read_backwards(np.array([-1, *context]), len(context))
    return sum(read_backwards(text, at) < wanted for at in range(text.size))


@settings(max_examples=100, deadline=None)
@given(
    histories=st.lists(ROLLOUTS, min_size=1, max_size=3),
    rows=st.lists(
        st.tuples(st.lists(TOKENS, max_size=3), st.lists(TOKENS, max_size=12), st.integers(0, 3)),
        min_size=1, max_size=2 * MAX_QUERIES + 1,
    ),
)  # fmt: skip
def test_searches_side_by_side_find_how_many_positions_stand_before_each_context(
    histories: list[list[list[int]]], rows: list[tuple[list[int], list[int], int]]
) -> None:
    texts = [as_text([np.array(rollout, np.int32) for rollout in rollouts]) for rollouts in histories]
    snapshot = {number: PromptIndex.build({0: text}) for number, text in enumerate(texts)}
    arena, recent = Arena(), Recent(1 << 20)
    recent.take(snapshot)
    names = [number % (len(texts) + 1) for *_, number in rows]  # the last one is of a prompt without history
    slots = arena.slots(names, snapshot)
    tokens = np.zeros((len(rows), 15), np.int32)
    for b, (prompt, context, _) in enumerate(rows):
        tokens[b, : len(prompt) + len(context)] = prompt + context
    begins = np.array([len(prompt) for prompt, *_ in rows])
    ends = begins + [len(context) for _, context, _ in rows]
    # Use a subset of the rows in another order, because the caller decides which rows search.
    asking = [b for b in reversed(range(len(rows))) if ends[b] > 0]
    for first in range(0, len(asking), MAX_QUERIES):
        some = np.array(asking[first : first + MAX_QUERIES])
        own = found_in_history(some, tokens, ends, begins, slots, arena.arrays, BATCHED_SEARCH.new())
        elsewhere = found_in_others(some, tokens, ends, begins, recent.arrays, BATCHED_SEARCH.new())
        for q, b in enumerate(some):
            context = rows[b][1]
            text = texts[names[b]] if names[b] < len(texts) else np.zeros(0, np.int32)
            assert own[q] == counted(text, context)
            assert elsewhere[q] == counted(recent.text[:-1], context)


@pytest.mark.parametrize("num_equal", [1, 15, 16, 17, 100, 1000])
def test_keys_equal_to_a_key_are_counted(num_equal: int) -> None:
    keys = np.array([1, 2] + [5] * num_equal + [7] * 3)
    assert last_with_key(keys, 0, 2, keys.size, 5) == 2 + num_equal
    assert last_with_key(keys, 0, 2, 2 + num_equal, 5) == 2 + num_equal
    assert last_with_key(keys, 1, 1, keys.size - 1, 5) == 1 + num_equal
    assert last_with_key(keys, 0, 2, keys.size, 4) == 2


def test_a_match_is_measured_back_to_the_beginning_and_across_one_edit() -> None:
    text = np.array([-1, 1, 2, 3, 4, 5], np.int32)
    whole = np.array([9, 9, 1, 2, 3, 4, 5], np.int32)
    # Five tokens and the marker, and 8 more because the match covers the whole context.
    assert measured(text, 5, whole, 2) == (5 + 1 + 8, 0)
    replaced = np.array([1, 2, 7, 4, 5], np.int32)
    # 4 and 5 agree; past the 7, so do 1, 2 and the marker.
    assert measured(text, 5, replaced, 0) == (2, 3)


@settings(max_examples=150, deadline=None)
@given(rollouts=ROLLOUTS, context=st.lists(TOKENS, min_size=1, max_size=12))
def test_a_match_is_measured_only_within_its_rollout(rollouts: list[list[int]], context: list[int]) -> None:
    row = np.array(context, np.int32)
    text = as_text([np.array(rollout, np.int32) for rollout in rollouts])
    start = 0
    for rollout in rollouts:
        alone = as_text([np.array(rollout, np.int32)])
        for at in range(alone.size):
            assert measured(text, start + at, row, 0) == measured(alone, at, row, 0)
        start += alone.size


def test_a_context_with_invalid_tokens_agrees_at_most_to_the_texts_beginning() -> None:
    # Index -1 would wrap to the text's last entry, which equals the context's entry there.
    length, _ = measured(np.array([-1, 5], np.int32), 1, np.array([7, 5, -1, 5], np.int32), 0)
    assert length == 2


def test_a_match_ends_where_the_rollout_begins_even_if_the_prompt_agrees_too() -> None:
    text, context = np.array([-1, 5, 1, 2], np.int32), np.array([5, 1, 2], np.int32)
    # Two tokens of the rollout agree. Past the text's 5, which counts as an edit, both begin.
    assert measured(text, 3, context, 1) == (2, 1)
    # The 5 belongs to the rollout, so all of it agrees, including its beginning.
    assert measured(text, 3, context, 0) == (4 + 8, 0)
