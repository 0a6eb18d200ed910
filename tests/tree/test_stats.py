import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.tree import stats
from treering.tree.forest import Forest
from treering.tree.stats import (
    Bounds,
    Branching,
    BranchingCounter,
    flat_work,
    merged_work,
    train_flops,
    tree_work,
    visible_pairs,
    work_bounds,
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
STAR = [[*range(1024), *range(2000 + 64 * g, 2064 + 64 * g)] for g in range(8)]
MIDDLES = [[*range(512), *range(1000 * m, 1000 * m + 256)] for m in (1, 2)]
TWO_LEVELS = [[*middle, *range(9000 + 64 * g, 9064 + 64 * g)] for middle in MIDDLES for g in range(4)]
CATERPILLAR = [[*range(128 * (turn + 1)), *range(5000, 5064)] for turn in range(8)]
sequence_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=8)


def bounds(sequences: list[list[int]]) -> Bounds:
    forest = Forest.from_sequences(sequences)
    return work_bounds(flat_work(forest.branch_length), tree_work([forest]), TINY)


def branching(*forests: Forest) -> Branching:
    counter = BranchingCounter()
    for forest in forests:
        counter.add(forest)
    return counter.total()


def prefixes(sequences: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(sequence[: i + 1]) for sequence in sequences for i in range(len(sequence))}


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
    assert flat_work(forest.branch_length).num_pairs == sum(i + 1 for each in sequences for i in range(len(each)))


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
    [(STAR, 8704 / 1536, 5.29), (TWO_LEVELS, 6656 / 1536, 4.03), (CATERPILLAR, 5120 / 1536, 3.08)],
    ids=["star", "two-level", "caterpillar"],
)
def test_the_benchmark_cases_have_their_known_bounds(sequences, token_bound, flop_bound):
    result = bounds(sequences)
    assert result.token_bound == token_bound
    # The known figures are truncated, not rounded, after the second decimal.
    assert flop_bound <= result.flop_bound < flop_bound + 0.01


@given(sequence_lists)
def test_the_flop_bound_lies_between_the_bounds_of_tokens_and_of_pairs(sequences):
    # FLOPs are a sum of both, with the same weights for forest and flat batch.
    forest = Forest.from_sequences(sequences)
    pairs = max(1, flat_work(forest.branch_length).num_pairs) / max(1, visible_pairs(forest))
    result = bounds(sequences)
    low, high = sorted([result.token_bound, pairs])
    assert low >= 1.0
    assert low - 1e-12 <= result.flop_bound <= high + 1e-12


def test_counts_do_not_overflow_32_bits():
    length, num_copies = 100_000, 3
    forest = Forest.from_sequences([np.arange(length, dtype=np.int32)] * num_copies)
    pairs = length * (length + 1) // 2
    assert pairs > 2**31
    assert visible_pairs(forest) == pairs
    assert flat_work(np.full(num_copies, length, np.int32)).num_pairs == num_copies * pairs
    shape = NAMED_SHAPES["qwen3-32b"]
    assert train_flops(shape, 10**12, 10**18) == 3 * (2 * shape.params_per_token * 10**12 + 4 * 64 * 8192 * 10**18)
