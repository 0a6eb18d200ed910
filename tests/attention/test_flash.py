"""Flash refuses what its kernels do not compute, by name, and reads the blocks and ranges that flex reads."""

import pytest
import torch

from treering.attention import Form, TreeLayout, attend, flash
from treering.attention.flash import BLACKWELL, HOPPER, check_flash
from treering.attention.flex import BLOCK_SIZE, block_mask
from treering.errors import UnsupportedError
from treering.tree.forest import Forest


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "has_flash", lambda: True)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL, (12, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hopper_and_blackwell_are_accepted_in_16_bits(capability: tuple[int, int], dtype: torch.dtype) -> None:
    check_flash(capability, dtype, 128)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("capability", "dtype", "head_size", "reason"),
    [
        (None, torch.bfloat16, 128, "on no CUDA device: choose auto"),
        ((8, 0), torch.bfloat16, 128, "on a device of capability 8.0: choose auto"),
        (HOPPER, torch.float32, 128, "not in torch.float32: choose triton"),
        (HOPPER, torch.bfloat16, 192, "heads of at most 128, got 192"),
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
        with pytest.raises(UnsupportedError, match="no fixed order"):
            check_flash(HOPPER, torch.bfloat16, 128)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "has_flash", lambda: False)
    with pytest.raises(UnsupportedError, match="flash-attn-4, which is not installed: pip install --pre flash-attn-4"):
        check_flash(HOPPER, torch.bfloat16, 128)


def test_an_older_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "has_flash", lambda: True)
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    with pytest.raises(UnsupportedError, match=r"needs torch 2\.13 or newer, got 2\.12\.1"):
        check_flash(HOPPER, torch.bfloat16, 128)


def test_attention_on_a_cpu_is_refused() -> None:
    layout = TreeLayout(Forest.from_sequences([[1, 2, 3]]), torch.device("cpu"))
    inputs = [torch.zeros(1, 2, 3, 16, dtype=torch.bfloat16) for _ in range(3)]
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        attend(*inputs, layout=layout, form=Form(scale=0.25), backend="flash")


@pytest.mark.parametrize("query_block", [BLOCK_SIZE, 2 * BLOCK_SIZE])
@pytest.mark.parametrize("window", [None, 100])
def test_blocks_of_any_height_hold_every_visible_pair(query_block: int, window: int | None) -> None:
    sequences = [[0] * 300 + [1 + i] * 200 for i in range(3)]
    layout = TreeLayout(Forest.from_sequences(sequences), torch.device("cpu"))
    mask = block_mask(layout, window, query_block=query_block)
    listed = mask.to_dense()[0, 0].bool()
    seen = layout.visible(window)
    for i in range(listed.shape[0]):
        for j in range(listed.shape[1]):
            rows, keys = slice(i * query_block, (i + 1) * query_block), slice(j * BLOCK_SIZE, (j + 1) * BLOCK_SIZE)
            assert bool(listed[i, j]) or not bool(seen[rows, keys].any())


@pytest.mark.parametrize("query_block", [BLOCK_SIZE, 2 * BLOCK_SIZE])
def test_blocks_without_a_mask_are_whole_and_hide_no_pair(query_block: int) -> None:
    layout = TreeLayout(Forest.from_sequences([[0] * 256 + [1] * 70]), torch.device("cpu"))
    mask = block_mask(layout, None, query_block=query_block)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    seen, num_full = layout.visible(None), 0
    for i, length in enumerate(mask.full_kv_num_blocks[0, 0].tolist()):
        for j in mask.full_kv_indices[0, 0, i, :length].tolist():
            block = seen[i * query_block : (i + 1) * query_block, j * BLOCK_SIZE : (j + 1) * BLOCK_SIZE]
            assert block.shape == (query_block, BLOCK_SIZE)
            assert bool(block.all())
            num_full += 1
    # The second block of 128 queries sees all of the first block of keys; a block of 256 is never below it wholly.
    assert num_full == (1 if query_block == BLOCK_SIZE else 0)
