"""Recurrent layers compute every token once, from its tree parent's state; forks keep states if it pays."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.forests import bushy, comb, sequence_sets, star
from treering.attention import TreeLayout
from treering.attention.gateway import Boundary, StateGateway
from treering.model.recurrence_calls import (
    MAX_GROWTH,
    PRICES,
    Price,
    RecurrenceCalls,
    choose_batching,
    find_runs,
    make_calls,
    runs_of,
)
from treering.tree.forest import Forest

CPU = torch.device("cpu")
NOTHING = np.empty(0, np.int64)
PRICE = st.builds(Price, call=st.sampled_from([0, 3, 50, 10**6]), row=st.sampled_from([0, 5]))


def layout_of(sequences: list[list[int]], left: list[int] | None = None) -> TreeLayout:
    """Return the layout of a whole forest, or of one whose children need the tokens `left`."""
    forest = Forest.from_sequences(sequences)
    if left is None:
        return TreeLayout(forest, CPU)
    boundary = Boundary(
        above=None,
        slots=NOTHING,
        start=np.full(forest.num_tokens, -1),
        left=np.array(sorted(set(left)), np.int64),
        gateway=StateGateway(),
    )
    return TreeLayout(forest, CPU, boundary=boundary)


def paths_of(calls: RecurrenceCalls, num_tokens: int) -> tuple[list[tuple[int, ...] | None], list[tuple[int, ...]]]:
    """Return the token path of each output and each kept state, by walking the calls."""
    seen: list[tuple[int, ...]] = []
    kept: list[tuple[int, ...]] = []
    above: list[tuple[int, ...]] = []
    for level in calls.levels:
        ends = []
        for call in level:
            rows = zip(call.tokens.tolist(), call.start.tolist(), call.length.tolist(), strict=True)
            for row, (tokens, start, length) in enumerate(rows):
                path = above[start] if start >= 0 else ()
                for index, token in enumerate(tokens):
                    path = (*path, token) if index < length else ()
                    seen.append(path)
                if row in call.kept.tolist():
                    ends.append((*(above[start] if start >= 0 else ()), *tokens[:length]))
                    # A state after padding is right only if the padding mask is given and closes the gates.
                    is_padding = [False] * len(tokens) if call.padding is None else call.padding[row].tolist()
                    assert is_padding == [index >= length for index in range(len(tokens))]
        above = ends
        kept += ends
    return [seen[index] for index in calls.source.tolist()], [kept[index] for index in calls.left.tolist()]


def num_calls(calls: RecurrenceCalls) -> int:
    return sum(len(level) for level in calls.levels)


def num_computed(calls: RecurrenceCalls) -> int:
    """Count computed tokens, including rescanned ones and padding."""
    return sum(call.tokens.numel() for level in calls.levels for call in level)


def path_to(forest: Forest, token: int) -> tuple[int, ...]:
    path: tuple[int, ...] = ()
    while token >= 0:
        path, token = (token, *path), int(forest.parent[token])
    return path


@given(sequences=sequence_sets(), price=PRICE, data=st.data())
def test_every_output_and_every_state_has_seen_its_own_path(
    sequences: list[list[int]], price: Price, data: st.DataObject
) -> None:
    num_tokens = Forest.from_sequences(sequences).num_tokens
    left = data.draw(st.lists(st.integers(0, num_tokens - 1), max_size=4))
    layout = layout_of(sequences, left)
    outputs, states = paths_of(make_calls(layout, price), num_tokens)
    assert outputs == [path_to(layout.forest, token) for token in range(num_tokens)]
    assert states == [path_to(layout.forest, token) for token in sorted(set(left))]


@given(sequences=sequence_sets(), price=PRICE)
def test_calls_have_two_tokens_at_least_and_little_is_computed_twice(sequences: list[list[int]], price: Price) -> None:
    layout = layout_of(sequences)
    runs = runs_of(layout)
    batching = choose_batching(runs, price)
    assert all(call.tokens.shape[1] >= 2 for level in make_calls(layout, price).levels for call in level)
    # Keeping every fork's state, padded to one length per call, computes each token about once.
    least = choose_batching(runs, Price(call=0, row=0)).num_computed
    assert layout.forest.num_tokens <= least
    assert batching.num_computed <= max(least, MAX_GROWTH * layout.forest.num_tokens)


def test_runs_end_at_forks_and_where_a_state_is_needed() -> None:
    parent = Forest.from_sequences([[5, 6, 7], [5, 6, 8, 9]]).parent
    runs = find_runs(parent, np.full(5, -1), NOTHING)
    assert runs.first.tolist() == [0, 2, 3, 5]
    assert (runs.parent.tolist(), runs.num_children.tolist()) == ([-1, 0, 0], [2, 0, 0])
    cut = find_runs(parent, np.full(5, -1), np.array([0, 3]))
    assert cut.first.tolist() == [0, 1, 2, 3, 4, 5]
    assert cut.is_left.tolist() == [True, False, False, True, False]


def test_a_long_prompt_is_forked_and_a_short_one_rescanned() -> None:
    price = Price(call=500, row=0)
    forked = make_calls(layout_of(star(2, prompt=1000, response=20)), price)
    assert (num_calls(forked), num_computed(forked)) == (2, 1040)
    rescanned = make_calls(layout_of(star(2, prompt=100, response=20)), price)
    assert (num_calls(rescanned), num_computed(rescanned)) == (1, 240)


def test_rescanning_stays_within_its_bound_of_tokens() -> None:
    layout = layout_of(star(50, prompt=100, response=10))
    calls = make_calls(layout, Price(call=10**6, row=0))
    assert num_computed(calls) == layout.forest.num_tokens


@pytest.mark.parametrize("sequences", [bushy(400), [[i % 5 for i in range(20_000)]], star(2000), comb(2000)[::10]])
def test_plans_of_large_forests_take_moderate_memory(sequences: list[list[int]]) -> None:
    layout = layout_of(sequences)
    calls = make_calls(layout, PRICES["cpu"])
    assert num_computed(calls) <= MAX_GROWTH * layout.forest.num_tokens
