"""The real flash-attn-4 package, without a device: its compiler accepts our masks, its kernels our lists.

Run by `make gpu-check`. The compiler targets Hopper and reads tensors that have shapes and no memory.
"""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.attention.given import CPU
from treering.attention import TreeLayout, flash
from treering.attention.flash import FlashTables
from treering.tree.forest import Forest

pytestmark = [
    pytest.mark.skipif(find_spec("cutlass") is None, reason="needs flash-attn-4: make gpu-check"),
    pytest.mark.filterwarnings("ignore"),
]

HOPPER = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def kernel(folder: Path) -> Iterator[ModuleType]:
    patch = pytest.MonkeyPatch()
    for name, value in HOPPER.items():
        patch.setenv(name, value)
    for name in ("DIR", "ENABLED"):
        # Set first, so that it is restored after the tests.
        patch.setenv(f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}", "")
        patch.delenv(f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}")
    patch.setenv("TREERING_CACHE", str(folder / "cache"))
    yield flash._kernel()
    patch.undo()


def test_the_compiler_accepts_every_function_that_it_is_given(kernel: ModuleType) -> None:
    from cutlass.base_dsl.ast_preprocessor import DSLPreprocessor

    checker = DSLPreprocessor([])
    checker._start_session()
    nodes = ast.walk(ast.parse(Path(str(kernel.__file__)).read_text()))
    accepted = [node.name for node in nodes if checker.check_decorator(node)]
    assert accepted == ["on_path", "on_path_within_window"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_size", "window", "has_sinks", "softcap"),
    [(128, None, False, 0.0), (64, 100, True, 0.0), (192, None, False, 0.0), (256, 100, False, 50.0)],
)
def test_both_kernels_compile_for_hopper(
    head_size: int, window: int | None, has_sinks: bool, softcap: float, kernel: ModuleType, folder: Path
) -> None:
    num_kept = len(list(folder.rglob("*.o")))
    layout = TreeLayout(Forest.from_sequences([[0] * 500 + [1 + i] * 400 for i in range(3)]), CPU)
    tables = FlashTables.of(layout, window, flash.blocks_of(flash.HOPPER, head_size))
    with FakeTensorMode():

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="cuda")

        lists = [[empty(*tensor.shape, dtype=tensor.dtype) for tensor in tensors] for tensors in tables[:3]]
        query, key, value = (empty(1, layout.forest.num_tokens, heads, head_size) for heads in (16, 8, 8))
        sinks = empty(16) if has_sinks else None
        numbers = (tables.block_size, head_size**-0.5, softcap)
        out, lse = kernel.run_forward(query, key, value, sinks, *lists, *numbers)
        found = kernel.run_backward(empty(*query.shape), query, key, value, out, lse, sinks, *lists, *numbers)
    # The next process loads both passes.
    assert len(list(folder.rglob("*.o"))) >= num_kept + 2
    inputs = [query, key, value] + [sinks] * has_sinks
    assert lse.shape == (1, 16, layout.forest.num_tokens)
    assert [(gradient.shape, gradient.dtype) for gradient in found] == [(like.shape, like.dtype) for like in inputs]


@pytest.mark.parametrize("num_tokens", [1, 40, 200])
def test_lists_of_short_forests_have_the_shapes_that_the_package_expects(num_tokens: int, kernel: ModuleType) -> None:
    from flash_attn.cute.block_sparsity import get_block_sparse_expected_shapes

    tables = FlashTables.of(TreeLayout(Forest.from_sequences([[0] * num_tokens]), CPU), None, (128, 128))
    rows = torch.empty(1, num_tokens, 1, 1)
    for lists, by_key in ((tables.by_query, False), (tables.by_key, True)):
        named = kernel._named(lists, rows, rows, (128, 128), by_key=by_key)
        count, index = get_block_sparse_expected_shapes(1, 1, num_tokens, num_tokens, 128, 128, 1)
        for lengths, blocks in (named[:2], named[2:4]):
            assert lengths.shape == count
            assert blocks.shape[:3] == index[:3]
            assert blocks.shape[3] <= index[3]
