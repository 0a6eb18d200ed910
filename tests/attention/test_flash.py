"""Flash refuses what its kernels do not compute, by name, and what the kernels read is the mask of the forest."""

import pytest
import torch

from tests.attention.given import CPU
from treering.attention import Form, TreeLayout, attend
from treering.attention.flash import backend as flash
from treering.attention.flash.backend import blocks_of, check_flash
from treering.attention.flash.tables import FlashTables
from treering.attention.self_check import LAUNCHES
from treering.errors import UnsupportedError
from treering.tree.forest import Forest


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "flash_version", lambda: "4.0.0b36")


@pytest.mark.parametrize(("capability", "head_size"), [((9, 0), 256), ((9, 0), 64), ((10, 0), 128), ((11, 0), 128)])
@pytest.mark.parametrize("version", ["4.0.0b26", "4.0.0b110", "4.0.0", "4.1.0b1"])
def test_hopper_and_blackwell_are_accepted_in_16_bits(
    version: str, capability: tuple[int, int], head_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "flash_version", lambda: version)
    for dtype in (torch.bfloat16, torch.float16):
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


def test_attention_on_a_cpu_is_refused() -> None:
    layout = TreeLayout(Forest.from_sequences([[1, 2, 3]]), CPU)
    inputs = [torch.zeros(1, 2, 3, 16, dtype=torch.bfloat16) for _ in range(3)]
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        attend(*inputs, layout=layout, form=Form(scale=0.25), backend="flash")


def test_a_fault_of_one_in_a_hundred_launches_is_seen() -> None:
    assert 0.99 ** LAUNCHES["flash"] < 1e-3


@pytest.mark.parametrize("generation", [9, 10])
@pytest.mark.parametrize("head_size", [64, 256])
def test_blocks_of_the_kernels_sizes_leave_out_hidden_ones(generation: int, head_size: int) -> None:
    rows, keys = blocks_of(generation, head_size)
    layout = TreeLayout(Forest.from_sequences([[0] * 500 + [1 + i] * 400 for i in range(3)]), CPU)
    tables = FlashTables.of(layout, None, (rows, keys))
    num_blocks = -(-layout.forest.num_tokens // rows) * -(-layout.forest.num_tokens // keys)
    for lists in (tables.by_query, tables.by_key):
        num_masked, num_full = (int(lengths.sum()) for lengths in lists[::2])
        assert num_full > 0
        assert num_full + num_masked < 0.7 * num_blocks


def test_blocks_fit_the_tiles_of_the_kernels() -> None:
    assert [blocks_of(9, size) for size in (64, 128, 192, 256)] == [(128, 128), (128, 128), (128, 96), (128, 64)]
    assert blocks_of(10, 128) == (256, 128)
