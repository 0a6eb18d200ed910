"""A fragment keeps its tree's structure and positions, and a query sees a key iff it descends from the key."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.forests import sequence_sets
from treering.tree.forest import Forest
from treering.tree.partition import query_ranges, take_fragment


def ancestors_of(tree: Forest, token: int) -> set[int]:
    path = set()
    while token >= 0:
        path.add(token)
        token = int(tree.parent[token])
    return path


def chosen_tokens(tree: Forest, seed: int) -> np.ndarray:
    chosen = np.random.default_rng(seed).random(tree.num_tokens) < 0.6
    chosen[0] = True
    return np.flatnonzero(chosen).astype(np.int32)


@given(sequences=sequence_sets(), seed=st.integers(0, 10**6))
def test_a_fragment_has_the_parents_ends_and_positions_of_its_tree(sequences: list[list[int]], seed: int) -> None:
    tree = Forest.from_sequences(sequences)
    tokens = chosen_tokens(tree, seed)
    fragment = take_fragment(tree, tokens)
    index_of = {int(token): i for i, token in enumerate(tokens)}
    assert fragment.tokens.tolist() == tree.tokens[tokens].tolist()
    assert fragment.position.tolist() == tree.position[tokens].tolist()
    assert fragment.parent.tolist() == [index_of.get(int(tree.parent[token]), -1) for token in tokens]
    ends = [sum(int(token) in ancestors_of(tree, int(other)) for other in tokens) for token in tokens]
    assert (fragment.subtree_end - np.arange(tokens.size)).tolist() == ends


@given(sequences=sequence_sets(), seed=st.integers(0, 10**6))
def test_segments_of_a_fragment_are_chains_of_one_end(sequences: list[list[int]], seed: int) -> None:
    tree = Forest.from_sequences(sequences)
    fragment = take_fragment(tree, chosen_tokens(tree, seed))
    bounds = [*fragment.segment_start.tolist(), fragment.num_tokens]
    for start, stop in pairwise(bounds):
        assert len(set(fragment.subtree_end[start:stop].tolist())) == 1
    for number, above in enumerate(fragment.segment_parent.tolist()):
        parent = int(fragment.parent[fragment.segment_start[number]])
        assert (above < 0) == (parent < 0)
        if parent >= 0:
            assert bounds[above] <= parent < bounds[above + 1]


@given(sequences=sequence_sets(), seed=st.integers(0, 10**6))
def test_query_ranges_are_descent(sequences: list[list[int]], seed: int) -> None:
    tree = Forest.from_sequences(sequences)
    queries = chosen_tokens(tree, seed)
    keys = np.setdiff1d(np.arange(tree.num_tokens, dtype=np.int32), queries)
    ranges = query_ranges(tree, keys, queries)
    for at, key in enumerate(keys):
        seen = [i for i, query in enumerate(queries) if int(key) in ancestors_of(tree, int(query))]
        assert list(range(int(ranges.first[at]), int(ranges.stop[at]))) == seen
