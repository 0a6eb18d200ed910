"""Flash refuses what its kernels do not compute, by name, and what the kernels read is the mask of the forest."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.attention.test_ancestors import CPU
from tests.forests import SHAPES, sequence_sets
from tests.partitions import random_partitions
from treering.attention import Form, TreeLayout, attend
from treering.attention.ancestors import Ancestor
from treering.attention.flash import backend as flash
from treering.attention.flash.backend import blocks_of, check_flash
from treering.attention.flash.tables import BlockLists, FlashTables, flash_tables
from treering.attention.gateway import Gateway
from treering.attention.self_check import LAUNCHES
from treering.errors import UnsupportedError
from treering.tree.forest import Forest
from treering.tree.plan.fragment import sight_of, take_fragment


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "flash_version", lambda: "4.0.0b36")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("capability", "head_size"), [((9, 0), 256), ((9, 0), 64), ((10, 0), 128), ((11, 0), 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hopper_and_blackwell_are_accepted_in_16_bits(
    capability: tuple[int, int], head_size: int, dtype: torch.dtype
) -> None:
    check_flash(capability, dtype, head_size)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("capability", "dtype", "head_size", "reason"),
    [
        (None, torch.bfloat16, 128, "on no CUDA device: choose auto"),
        ((8, 0), torch.bfloat16, 128, "on a device of capability 8.0: choose auto"),
        ((12, 0), torch.bfloat16, 128, "on a device of capability 12.0: choose auto"),
        ((9, 0), torch.float32, 128, "not in torch.float32: choose triton"),
        ((9, 0), torch.bfloat16, 264, "heads of at most 256 on this device, in multiples of 8, got 264"),
        ((9, 0), torch.bfloat16, 60, "in multiples of 8, got 60"),
        ((10, 0), torch.bfloat16, 192, "heads of at most 128 on this device"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(
    capability: tuple[int, int] | None, dtype: torch.dtype, head_size: int, reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        check_flash(capability, dtype, head_size)


@pytest.mark.usefixtures("installed")
def test_deterministic_mode_is_refused() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(UnsupportedError, match="no fixed order on Hopper"):
            check_flash((9, 0), torch.bfloat16, 128)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, r"flash-attn-4, which is not installed: pip install 'treering\[flash\]'"),
        ("4.0.0b25", "4.0.0b26 or newer, got 4.0.0b25, whose backward reads values before they are written"),
        ("4.0.0b9", "got 4.0.0b9"),
        ("4.0.0a1", "got 4.0.0a1"),
        ("3.0.0", "got 3.0.0"),
    ],
)
def test_a_missing_or_old_package_is_named(version: str | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "flash_version", lambda: version)
    with pytest.raises(UnsupportedError, match=reason):
        check_flash((9, 0), torch.bfloat16, 128)


@pytest.mark.parametrize("version", ["4.0.0b26", "4.0.0b110", "4.0.0", "4.1.0b1"])
def test_newer_packages_are_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "flash_version", lambda: version)
    check_flash((9, 0), torch.bfloat16, 128)


def test_attention_on_a_cpu_is_refused() -> None:
    layout = TreeLayout(Forest.from_sequences([[1, 2, 3]]), CPU)
    inputs = [torch.zeros(1, 2, 3, 16, dtype=torch.bfloat16) for _ in range(3)]
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        attend(*inputs, layout=layout, form=Form(scale=0.25), backend="flash")


def test_a_fault_of_one_in_a_hundred_launches_is_seen() -> None:
    assert 0.99 ** LAUNCHES["flash"] < 1e-3


def listed(lists: BlockLists) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """The masked and the full pairs of one side, as (own block, other block); only as many as their lengths say."""
    found = []
    for each in (lists.masked, lists.full):
        lengths, blocks = each.lengths[0, 0].tolist(), each.blocks[0, 0].tolist()
        pairs = [(own, other) for own, length in enumerate(lengths) for other in blocks[own][:length]]
        assert len(set(pairs)) == len(pairs)
        assert all(row[:length] == sorted(row[:length]) for row, length in zip(blocks, lengths, strict=True))
        found.append(set(pairs))
    return found[0], found[1]


def seen_by_kernel(tables: FlashTables, num_rows: int, *, by_key: bool) -> NDArray[np.bool_]:
    """Which pairs a kernel weighs, bool [rows, keys] with the padding of the last blocks of keys.

    Full blocks are weighed whole, masked ones where the mask function says so, others not at all.
    """
    rows_per_block, keys_per_block = tables.block_size
    ranges = [array.numpy() for array in tables.ranges]
    rows = np.arange(-(-num_rows // rows_per_block) * rows_per_block)[:, None]
    visible = (rows >= ranges[0]) & (rows < ranges[1])
    if len(ranges) == 4:
        visible &= ranges[3][rows[:, 0]][:, None] < ranges[2]
    masked, full = listed(tables.by_key if by_key else tables.by_query)
    assert not masked & full
    seen = np.zeros_like(visible)
    for pairs, is_full in ((masked, False), (full, True)):
        for own, other in pairs:
            i, j = (other, own) if by_key else (own, other)
            at = np.s_[i * rows_per_block : (i + 1) * rows_per_block, j * keys_per_block : (j + 1) * keys_per_block]
            seen[at] = True if is_full else visible[at]
    # Rows of the padding are computed and never written.
    return seen[:num_rows]


def assert_reads_the_mask(layout: TreeLayout, window: int | None, block_size: tuple[int, int]) -> FlashTables:
    window = layout.effective_window(window)
    tables = flash_tables(layout, window, block_size)
    wanted = layout.visible(window).numpy()
    for by_key in (False, True):
        seen = seen_by_kernel(tables, layout.forest.num_tokens, by_key=by_key)
        np.testing.assert_array_equal(seen[:, : wanted.shape[1]], wanted)
        assert not seen[:, wanted.shape[1] :].any()
    sizes = [block_size[1]] * 3 + [block_size[0]]
    lengths = [wanted.shape[1]] * 3 + [wanted.shape[0]]
    for array, size, length in zip(tables.ranges, sizes, lengths, strict=False):
        assert array.dtype == torch.int32
        assert array.numel() == -(-length // size) * size
    return tables


@settings(deadline=None)
@given(
    sequences=sequence_sets(max_extra=40),
    block_size=st.tuples(st.sampled_from([2, 8, 16]), st.sampled_from([1, 4, 8])),
    window=st.one_of(st.none(), st.integers(1, 50)),
)
def test_both_kernels_read_the_mask_of_a_forest(
    sequences: list[list[int]], block_size: tuple[int, int], window: int | None
) -> None:
    assert_reads_the_mask(TreeLayout(Forest.from_sequences(sequences), CPU), window, block_size)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", ["bushy", "star", "comb"])
@pytest.mark.parametrize("seed", range(3))
def test_both_kernels_read_the_mask_of_a_partition(name: str, seed: int, window: int | None) -> None:
    (tree,) = Forest.from_sequences([[0, *sequence] for sequence in SHAPES[name]]).trees()
    partitions = random_partitions(tree, seed)
    assert len(partitions) > 1
    for part in partitions:
        ancestors, above = [], part.parent
        while above >= 0:
            ancestors.append(Ancestor.from_sight(Gateway(), sight_of(tree, partitions[above].tokens, part.tokens)))
            above = partitions[above].parent
        layout = TreeLayout(take_fragment(tree, part.tokens), CPU, ancestors=tuple(ancestors))
        assert_reads_the_mask(layout, window, (8, 4))


@pytest.mark.parametrize("generation", [9, 10])
@pytest.mark.parametrize("head_size", [64, 128, 192, 256])
def test_blocks_of_the_kernels_sizes_read_the_mask_and_leave_out_hidden_ones(generation: int, head_size: int) -> None:
    block_size = blocks_of(generation, head_size)
    sequences = [[0] * 500 + [1 + i] * 400 for i in range(3)]
    layout = TreeLayout(Forest.from_sequences(sequences), CPU)
    masked, full = listed(assert_reads_the_mask(layout, None, block_size).by_query)
    num_blocks = -(-layout.forest.num_tokens // block_size[0]) * -(-layout.forest.num_tokens // block_size[1])
    assert full
    assert len(masked | full) < 0.7 * num_blocks


def test_blocks_fit_the_tiles_of_the_kernels() -> None:
    assert [blocks_of(9, size) for size in (64, 128, 192, 256)] == [(128, 128), (128, 128), (128, 96), (128, 64)]
    assert blocks_of(10, 128) == (256, 128)
