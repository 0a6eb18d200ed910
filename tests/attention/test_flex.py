"""FlexAttention on forests equals the reference; its block mask lists every visible pair, and full blocks hide none."""

import shutil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tests.attention.given import layout_of, random_inputs
from tests.forests import SHAPES, sequence_sets, star
from treering.attention import ScoreOptions, TreeLayout, attend, flex
from treering.attention.flex import BLOCK_SIZE, block_mask
from treering.errors import UnsupportedError

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
LONG: dict[str, list[list[int]]] = {
    "one token": [[1]],
    "a block and a token": [[1] * 129],
    "prompt and responses": [[0] * 300 + [1 + i] * 200 for i in range(3)],
    "star": star(160, prompt=40, response=3),
    "comb": SHAPES["reversed comb"],
    "trees": [[i] * 100 for i in range(5)],
}


def assert_flex_equals_the_reference(layout: TreeLayout, options: ScoreOptions, sinks: Tensor | None = None) -> None:
    inputs = [tensor.detach() for tensor in random_inputs(layout.forest.num_tokens, dtype=torch.float32)]
    arguments: dict[str, Any] = {"layout": layout, "options": options, "sinks": sinks}
    with torch.no_grad():
        got = attend(*inputs, backend="flex", **arguments)
        wanted = attend(*inputs, backend="reference", **arguments)
    assert got.dtype == wanted.dtype
    # Float32 sums of up to N terms, in another order.
    assert float((got - wanted).norm()) <= 1e-6 * float(wanted.norm())


def listed_blocks(mask: BlockMask) -> dict[tuple[int, int], bool]:
    """Map each listed pair of blocks to whether it is listed as full."""
    blocks = {}
    lists = ((False, mask.kv_num_blocks, mask.kv_indices), (True, mask.full_kv_num_blocks, mask.full_kv_indices))
    for is_full, lengths, indices in lists:
        assert lengths is not None
        assert indices is not None
        for row, length in enumerate(lengths[0, 0].tolist()):
            for column in indices[0, 0, row, :length].tolist():
                assert (row, column) not in blocks
                blocks[row, column] = is_full
    return blocks


@pytest.mark.parametrize("window", [None, 50, 129])
@pytest.mark.parametrize("name", LONG)
def test_no_visible_pair_is_outside_the_blocks_and_full_blocks_hide_none(name: str, window: int | None) -> None:
    layout = layout_of(LONG[name])
    window = layout.effective_window(window)
    mask = block_mask(layout, window)
    blocks = listed_blocks(mask)
    seen = layout.visible(window).numpy()
    for i in range(-(-seen.shape[0] // BLOCK_SIZE)):
        for j in range(-(-seen.shape[1] // BLOCK_SIZE)):
            pairs = seen[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE, j * BLOCK_SIZE : (j + 1) * BLOCK_SIZE]
            assert (i, j) in blocks or not pairs.any()
            is_whole = pairs.shape == (BLOCK_SIZE, BLOCK_SIZE)
            assert not blocks.get((i, j), False) or (is_whole and pairs.all())


@pytest.mark.parametrize(
    ("name", "options", "with_sinks"),
    [
        ("a block and a token", ScoreOptions(scale=0.3), True),
        ("star", ScoreOptions(scale=0.3, softcap=0.7), True),
        ("trees", ScoreOptions(scale=0.3, window=50, softcap=0.7), False),
    ],
)
def test_flex_equals_the_reference(name: str, options: ScoreOptions, with_sinks: bool) -> None:
    layout = layout_of(LONG[name])
    assert_flex_equals_the_reference(layout, options, SINKS if with_sinks else None)


@given(sequences=sequence_sets(), window=st.one_of(st.none(), st.integers(1, 12)))
@settings(max_examples=3)
def test_flex_equals_the_reference_on_random_forests(sequences: list[list[int]], window: int | None) -> None:
    layout = layout_of(sequences)
    assert_flex_equals_the_reference(layout, ScoreOptions(scale=0.3, window=window), SINKS)


def test_a_gradient_on_cpu_is_refused() -> None:
    layout = layout_of([[1, 2, 3]])
    inputs = [tensor.requires_grad_() for tensor in random_inputs(3)]
    with pytest.raises(UnsupportedError, match="no backward on CPU, because torch has none: choose segments"):
        attend(*inputs, layout=layout, options=ScoreOptions(scale=0.3), backend="flex")
    with torch.no_grad():
        attend(*inputs, layout=layout, options=ScoreOptions(scale=0.3), backend="flex")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPU with g++, which is absent")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_flex_visits_the_listed_blocks_only_and_equals_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled flex uses only the mask; compiled kernels follow the lists of blocks."""
    # Compile static shapes: with dynamic ones, torch's C++ may name an undefined variable, depending on what was
    # compiled before.
    compile_any = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda call, **arguments: compile_any(call, **{**arguments, "dynamic": False})
    )
    monkeypatch.setattr(flex, "_dense", flex._compiled.__wrapped__())
    # Precompiled headers cost more than they save in one kernel.
    monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)
    layout = layout_of(LONG["star"])
    assert_flex_equals_the_reference(layout, ScoreOptions(scale=0.3, window=30))
