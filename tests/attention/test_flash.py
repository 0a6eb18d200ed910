"""Flash names what it refuses because its kernels lack it, and its tables encode the mask of the forest."""

import ast
import itertools
import os
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.attention import fake_flash
from tests.attention.given import CPU
from treering.attention import ScoreOptions, TreeLayout, attend, flash
from treering.attention.dispatch import LAUNCHES
from treering.attention.flash import FlashTables, blocks_of, check_flash
from treering.errors import UnsupportedError
from treering.tree.forest import Forest


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "flash_version", lambda: "4.0.0b36")


@pytest.mark.parametrize(
    ("version", "capability", "head_size"),
    [
        *itertools.product(["4.0.0b26", "4.0.0b32"], [(9, 0), (10, 0), (11, 0)], [64, 128]),
        *itertools.product(["4.0.0b33", "4.0.0b110", "4.0.0", "4.1.0b1"], [(9, 0)], [64, 160, 192, 256]),
    ],
)
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
        ((9, 0), torch.bfloat16, 264, "heads of at most 256 on this device, in multiples of 32, got 264"),
        ((9, 0), torch.bfloat16, 80, "in multiples of 32, got 80"),
        ((10, 0), torch.bfloat16, 60, "in multiples of 8, got 60"),
        ((10, 0), torch.bfloat16, 192, "heads of at most 128 on this device"),
    ],
)
def test_options_that_the_kernels_lack_are_refused(
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
        (None, r"flash-attn-4, which is not installed: pip install 'flash-attn-4>=4.0.0b26', or"),
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


@pytest.mark.parametrize("version", ["4.0.0b26", "4.0.0b29", "4.0.0b32"])
@pytest.mark.parametrize("head_size", [160, 192, 256])
def test_heads_above_128_need_a_newer_package(version: str, head_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "flash_version", lambda: version)
    with pytest.raises(UnsupportedError, match=f"4.0.0b33 or newer for heads above 128, got {version} and heads of"):
        check_flash((9, 0), torch.float16, head_size)


def test_the_version_is_read_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(flash, "find_spec", lambda name: name)
    monkeypatch.setattr(flash.metadata, "version", lambda name: names.append(name) or "4.0.0b36")
    flash.flash_version.cache_clear()
    for _ in range(3):
        check_flash((9, 0), torch.bfloat16, 128)
    flash.flash_version.cache_clear()
    assert names == ["flash-attn-4"]


def attend_by_fake(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    fake_flash.install(monkeypatch)
    layout = TreeLayout(Forest.from_sequences([[1, 2, 3]]), CPU)
    inputs = [torch.ones(1, 2, 3, 16, requires_grad=True) for _ in range(3)]
    monkeypatch.setenv("TREERING_SELF_CHECK", "0")
    return attend(*inputs, layout=layout, options=ScoreOptions(scale=0.25), backend="flash")


def test_eager_layers_pay_for_no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_forward", "flash_backward"):
        monkeypatch.setattr(flash, name, None)
    out = attend_by_fake(monkeypatch)
    out.sum().backward()
    # All values are ones, so their means are too.
    assert torch.allclose(out, torch.ones_like(out))


@pytest.mark.parametrize("own", [None, "/their/folder"])
def test_compiled_kernels_are_kept_in_a_private_folder_unless_the_user_names_one(
    own: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}" for name in ("DIR", "ENABLED")]
    for name in names:
        monkeypatch.setenv(name, own or "")
        if own is None:
            monkeypatch.delenv(name)
    monkeypatch.setenv("TREERING_CACHE", str(tmp_path / "cache"))
    at_import: list[str] = []

    def load(name: str) -> ModuleType:
        at_import[:] = at_import or [os.environ.get(option, "unset") for option in names]
        return import_module(name)

    monkeypatch.setattr(flash, "import_module", load)
    attend_by_fake(monkeypatch)
    folder = tmp_path / "cache/flash"
    assert at_import == ([str(folder), "1"] if own is None else [own, own])
    assert folder.stat().st_mode & 0o077 == 0


def test_attention_on_a_cpu_is_refused() -> None:
    layout = TreeLayout(Forest.from_sequences([[1, 2, 3]]), CPU)
    inputs = [torch.zeros(1, 2, 3, 16, dtype=torch.bfloat16) for _ in range(3)]
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        attend(*inputs, layout=layout, options=ScoreOptions(scale=0.25), backend="flash")


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


def test_masks_are_compiled_before_any_other_decorator_sees_them() -> None:
    tree = ast.parse(Path(flash.__file__).with_name("flash_kernel.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    decorators = {node.name: [ast.unparse(name) for name in node.decorator_list] for node in functions}
    compiled = {name: names for name, names in decorators.items() if "cute.jit" in names}
    assert compiled
    assert {name: names[-1] for name, names in compiled.items()} == dict.fromkeys(compiled, "cute.jit")
