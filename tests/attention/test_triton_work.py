"""The kernels' work lists visit every pair of blocks once, heaviest items first, and split large items."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.given import CPU
from tests.forests import sequence_sets
from treering.attention import TreeLayout
from treering.attention.blocks import BlockPairs, find_block_pairs
from treering.attention.triton_tables import (
    DIRECT,
    MAX_HEAD_SIZES,
    NUM_PROGRAMS,
    Tables,
    TileSize,
    WorkList,
    choose_tiles,
    launches,
    work_by_key,
    work_by_query,
)
from treering.tree.forest import Forest
from treering.tree.partition import QueryRanges


def pairs_of(sequences: list[list[int]], query_size: int, key_size: int, window: int | None = None) -> BlockPairs:
    ranges = QueryRanges.within(Forest.from_sequences(sequences))
    return find_block_pairs(ranges, ranges.position, query_size=query_size, key_size=key_size, window=window)


def visited(work: WorkList) -> list[tuple[int, int, bool]]:
    """Return (own block, other block, unmasked) of every visit."""
    found = []
    for block, start, middle, again, stop, _ in work.items.tolist():
        assert start <= middle == again <= stop
        found += [(block, other, True) for other in work.visits[start:middle].tolist()]
        found += [(block, other, False) for other in work.visits[middle:stop].tolist()]
    return found


@given(
    sequences=sequence_sets(max_extra=40),
    sizes=st.tuples(st.sampled_from([1, 3, 8]), st.sampled_from([1, 4, 8])),
    window=st.one_of(st.none(), st.integers(1, 50)),
    max_visits=st.integers(1, 5),
)
def test_every_pair_of_blocks_is_visited_once(
    sequences: list[list[int]], sizes: tuple[int, int], window: int | None, max_visits: int
) -> None:
    pairs = pairs_of(sequences, *sizes, window)
    wanted = sorted(zip(pairs.query_block.tolist(), pairs.key_block.tolist(), pairs.is_full.tolist(), strict=True))
    assert sorted(visited(work_by_query(pairs, CPU))) == wanted
    by_key = work_by_key(pairs, max_visits, CPU)
    assert sorted((other, own, full) for own, other, full in visited(by_key)) == wanted
    assert_shared_in_order(by_key, max_visits)


def assert_shared_in_order(work: WorkList, max_visits: int) -> None:
    """Check lengths and order of items, and that each block is written once or by consecutive added slots."""
    lengths = work.items[:, 4] - work.items[:, 1]
    assert (lengths <= max_visits).all()
    assert (np.diff(lengths) <= 0).all()
    split = {block: list(range(first, last)) for block, first, last in work.splits.tolist()}
    slots: dict[int, list[int]] = {}
    for block, *_, slot in work.items.tolist():
        slots.setdefault(block, []).append(slot)
    assert all(sorted(found) == split.get(block, [DIRECT]) for block, found in slots.items())
    assert sorted(slot for shared in split.values() for slot in shared) == list(range(work.num_slots))
    assert sorted(slots) == list(range(len(slots)))


def test_a_block_of_keys_that_no_row_sees_still_has_an_item() -> None:
    # The item writes zeros as the gradient of these keys.
    ranges = QueryRanges(first=np.array([0, 5, 5]), stop=np.array([5, 5, 5]), position=np.arange(3))
    pairs = find_block_pairs(ranges, np.arange(5), query_size=5, key_size=1)
    assert sorted(work_by_key(pairs, 3, CPU).items[:, 0].tolist()) == [0, 1, 2]


def test_long_stars_give_enough_equal_items_and_chains_are_left_whole() -> None:
    tile = TileSize(64, 128)
    star = TreeLayout(Forest.from_sequences([[0] * 128 + [1 + i] * 512 for i in range(64)]), CPU)
    work = Tables.of(star, None).by_key(tile, num_heads=16, num_key_heads=8)
    lengths = (work.items[:, 4] - work.items[:, 1]).tolist()
    assert 8 * len(lengths) >= NUM_PROGRAMS
    assert max(lengths) <= 2 * sum(lengths) / len(lengths) * 4
    chain = TreeLayout(Forest.from_sequences([[0] * 32_768]), CPU)
    assert Tables.of(chain, None).by_key(tile, num_heads=16, num_key_heads=8).num_slots == 0


def test_tables_are_made_once_and_a_window_that_hides_nothing_is_none() -> None:
    layout = TreeLayout(Forest.from_sequences([[1] * 40]), CPU)
    tables = Tables.of(layout, None)
    assert Tables.of(layout, 40) is tables
    assert Tables.of(layout, 39) is not tables
    assert tables.by_query(TileSize(16, 16)) is tables.by_query(TileSize(16, 16))
    assert not tables.has_window


@pytest.mark.parametrize("dtype", MAX_HEAD_SIZES)
@pytest.mark.parametrize("size", [8, 64, 80, 128, 256])
def test_every_kernel_has_tiles_and_launches(dtype: torch.dtype, size: int) -> None:
    tiles = choose_tiles(size, dtype)
    for name in ("forward", "query_gradient", "key_gradient"):
        tile: TileSize = getattr(tiles, name)
        assert all(side & (side - 1) == 0 and side >= 16 for side in tile)
        assert len(launches(name, size, dtype)) >= 2
