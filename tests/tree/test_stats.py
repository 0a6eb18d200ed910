import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.tree import stats
from treering.tree.forest import Forest
from treering.tree.stats import (
    bounds,
    branching,
    flat_pairs,
    flat_work,
    merged_work,
    train_flops,
    tree_work,
    visible_pairs,
)
from treering.types import NAMED_SHAPES, ModelShape

TINY = ModelShape(
    name="tiny-qwen3",
    num_layers=2,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    intermediate_size=768,
    vocab_size=256,
)
sequence_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=8)


def prefixes(sequences: list[list[int]]) -> set[tuple[int, ...]]:
    """The distinct paths of a forest, one per token."""
    return {tuple(sequence[: i + 1]) for sequence in sequences for i in range(len(sequence))}


def star() -> list[list[int]]:
    return [list(range(1024)) + [2000 + 64 * g + i for i in range(64)] for g in range(8)]


def two_level() -> list[list[int]]:
    middles = [list(range(512)) + [1000 * m + 1000 + i for i in range(256)] for m in range(2)]
    return [middle + [9000 + 64 * g + i for i in range(64)] for middle in middles for g in range(4)]


def caterpillar() -> list[list[int]]:
    return [list(range(128 * (turn + 1))) + [5000 + i for i in range(64)] for turn in range(8)]


@given(sequence_lists, st.integers(1, 9))
def test_work_without_a_layout_is_that_of_the_forest_however_it_is_cut(sequences, part_tokens):
    flat = np.array([token for sequence in sequences for token in sequence], np.int32)
    offsets = np.cumsum([0, *map(len, sequences)]).astype(np.int64)
    parts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "_PART_TOKENS", part_tokens)
        found = merged_work(flat, offsets, after_part=lambda: parts.append(None))
    assert found == tree_work([Forest.from_sequences(sequences)])
    assert len(parts) <= len(sequences)


@given(sequence_lists)
def test_pairs_are_the_lengths_of_all_paths(sequences):
    forest = Forest.from_sequences(sequences)
    assert visible_pairs(forest) == sum(len(path) for path in prefixes(sequences))
    assert flat_pairs(forest) == sum(i + 1 for sequence in sequences for i in range(len(sequence)))


@given(sequence_lists)
def test_branching_counts_the_paths_of_the_prefix_tree(sequences):
    nodes = prefixes(sequences)
    children = {node: [other for other in nodes if other[:-1] == node] for node in nodes}
    starts = {node for node in nodes if len(node) == 1 or len(children[node[:-1]]) > 1}
    shape = branching(Forest.from_sequences(sequences))
    assert shape.num_leaves == sum(not below for below in children.values())
    assert shape.num_branch_points == sum(len(below) > 1 for below in children.values())
    assert shape.max_depth == max((len(node) for node in nodes), default=0)
    assert shape.num_segments == len(starts)
    crossed = [sum(node[: i + 1] in starts for i in range(len(node))) for node in nodes]
    assert shape.max_segments == max(crossed, default=0)


def test_segment_lengths_are_summarized_over_all_forests_and_empty_ones_add_nothing():
    forests = [Forest.from_sequences(s) for s in ([[5, 6, 7], [5, 6, 8, 9]], [], [list(range(10))])]
    shape = branching(*forests)
    assert shape.num_segments == 4
    assert (shape.median_segment_length, shape.mean_segment_length, shape.max_segment_length) == (2.0, 3.75, 10)
    assert shape.p90_segment_length == pytest.approx(2 + 0.7 * 8)
    assert (shape.num_leaves, shape.num_branch_points, shape.max_depth, shape.max_segments) == (3, 1, 10, 2)


def test_flops_are_counted_by_the_formula_written_out():
    params = 2 * (256 * 256 + 2 * 256 * 128 + 256 * 256 + 3 * 256 * 768) + 256 * 256
    assert train_flops(TINY, 10, 55) == 3 * (2 * params * 10 + 4 * 2 * 256 * 55)


@pytest.mark.parametrize(
    ("sequences", "token_bound", "flop_bound"),
    [(star(), 8704 / 1536, 5.29), (two_level(), 6656 / 1536, 4.03), (caterpillar(), 5120 / 1536, 3.08)],
    ids=["star", "two-level", "caterpillar"],
)
def test_the_benchmark_cases_have_their_known_bounds(sequences, token_bound, flop_bound):
    result = bounds(Forest.from_sequences(sequences), TINY)
    assert result.token_bound == token_bound
    # The known figures are cut, not rounded, after the second decimal.
    assert flop_bound <= result.flop_bound < flop_bound + 0.01


@given(sequence_lists)
def test_the_flop_bound_lies_between_one_and_the_token_bound(sequences):
    # Shared tokens are the shallow ones, so attention saves a smaller part than the matrices do.
    result = bounds(Forest.from_sequences(sequences), TINY)
    assert 1.0 <= result.flop_bound <= result.token_bound + 1e-12


def test_nothing_at_all_is_bounded_by_one():
    result = bounds(Forest.from_sequences([]), TINY)
    assert (result.token_bound, result.flop_bound) == (1.0, 1.0)


def test_counts_do_not_overflow_32_bits():
    length, num_copies = 100_000, 3
    forest = Forest.from_sequences([np.arange(length, dtype=np.int32)] * num_copies)
    pairs = length * (length + 1) // 2
    assert pairs > 2**31
    assert (visible_pairs(forest), flat_pairs(forest)) == (pairs, num_copies * pairs)
    assert flat_work(np.full(num_copies, length, np.int32)).num_pairs == num_copies * pairs
    shape = NAMED_SHAPES["qwen3-32b"]
    assert train_flops(shape, 10**12, 10**18) == 3 * (2 * shape.params_per_token * 10**12 + 4 * 64 * 8192 * 10**18)


@given(st.lists(sequence_lists, max_size=3))
def test_work_adds_up_over_forests(lists):
    forests = [Forest.from_sequences(sequences) for sequences in lists]
    total = tree_work(forests)
    assert total.num_tokens == sum(len(prefixes(sequences)) for sequences in lists)
    assert total.num_pairs == sum(len(path) for sequences in lists for path in prefixes(sequences))
