"""Block pairs cover every visible pair of tokens, mark only full blocks as full, and are found without N x N work."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forests import SHAPES, sequence_sets
from tests.partitions import random_partitions
from treering.attention.blocks import BlockPairs, find_block_pairs
from treering.tree.forest import Forest
from treering.tree.partition import QueryRanges, query_ranges


def visible(ranges: QueryRanges, position: np.ndarray, window: int | None) -> np.ndarray:
    rows = np.arange(position.size)[:, None]
    seen = (ranges.first <= rows) & (rows < ranges.stop)
    return seen if window is None else seen & (position[:, None] - ranges.position < window)


def assert_right(pairs: BlockPairs, seen: np.ndarray, query_size: int, key_size: int) -> int:
    """Check every block against the dense mask; return how many empty ones are visited."""
    flags = dict(
        zip(zip(pairs.query_block.tolist(), pairs.key_block.tolist(), strict=True), pairs.is_full, strict=True)
    )
    assert len(flags) == pairs.query_block.size
    num_empty = 0
    for i in range(pairs.num_query_blocks):
        for j in range(pairs.num_key_blocks):
            block = seen[i * query_size : (i + 1) * query_size, j * key_size : (j + 1) * key_size]
            assert (i, j) in flags or not block.any()
            assert not flags.get((i, j), False) or (block.shape == (query_size, key_size) and block.all())
            num_empty += (i, j) in flags and not block.any()
    return num_empty


@given(
    sequences=sequence_sets(max_extra=40),
    sizes=st.tuples(st.sampled_from([1, 3, 8]), st.sampled_from([1, 4, 8])),
    window=st.one_of(st.none(), st.integers(1, 50)),
)
def test_no_visible_pair_is_outside_and_no_full_block_hides_one(
    sequences: list[list[int]], sizes: tuple[int, int], window: int | None
) -> None:
    forest = Forest.from_sequences(sequences)
    ranges = QueryRanges.within(forest)
    pairs = find_block_pairs(ranges, ranges.position, query_size=sizes[0], key_size=sizes[1], window=window)
    num_empty = assert_right(pairs, visible(ranges, ranges.position, window), *sizes)
    if window is None:
        assert num_empty == 0
    order = np.lexsort((pairs.key_block, pairs.query_block))
    assert (order == np.arange(order.size)).all()


@pytest.mark.parametrize("name", [*SHAPES, "nothing"])
def test_blocks_of_a_forest_are_full_where_they_can_be(name: str) -> None:
    ranges = QueryRanges.within(Forest.from_sequences(SHAPES.get(name, [])))
    pairs = find_block_pairs(ranges, ranges.position, query_size=8, key_size=8)
    seen = visible(ranges, ranges.position, None)
    assert assert_right(pairs, seen, 8, 8) == 0
    for i, j, is_full in zip(pairs.query_block, pairs.key_block, pairs.is_full, strict=True):
        assert is_full == (seen[i * 8 : i * 8 + 8, j * 8 : j * 8 + 8].sum() == 64)


@given(
    sequences=sequence_sets(max_extra=30), seed=st.integers(0, 10**6), window=st.one_of(st.none(), st.integers(1, 30))
)
@settings(max_examples=50)
def test_keys_of_ancestors_are_covered(sequences: list[list[int]], seed: int, window: int | None) -> None:
    tree = Forest.from_sequences(sequences).trees()[0]
    partitions = random_partitions(tree, seed, 10)
    for part in partitions[1:]:
        ranges = query_ranges(tree, partitions[part.parent].tokens, part.tokens)
        position = tree.position[part.tokens].astype(np.int64)
        pairs = find_block_pairs(ranges, position, query_size=4, key_size=4, window=window)
        assert_right(pairs, visible(ranges, position, window), 4, 4)
