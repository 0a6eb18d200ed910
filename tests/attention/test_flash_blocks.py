"""Attention emulated block by block from flash's tables, forward and backward, also in compiled layers."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention import fake_flash
from tests.attention.given import assert_close, layout_of, random_inputs, results
from tests.forests import SHAPES, sequence_sets, star
from treering.attention import Backend, ScoreOptions, TreeLayout, attend, dispatch
from treering.attention.flash import FlashTables, flash_backward, flash_forward

BOTH: tuple[Backend, ...] = ("flash", "reference")
SMALL = (8, 6)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    dispatch.check_backend.cache_clear()
    yield
    dispatch.check_backend.cache_clear()


def assert_is_attention(
    layout: TreeLayout, inputs: list[Tensor], options: ScoreOptions, sinks: Tensor | None = None
) -> None:
    ways = (results(partial(attend, backend=name), inputs, sinks, layout=layout, options=options) for name in BOTH)
    assert_close(*ways, tolerance=1e-11)


@pytest.mark.parametrize(
    ("options", "with_sinks"),
    [
        (ScoreOptions(scale=0.3), True),
        (ScoreOptions(scale=0.3, window=9), False),
        (ScoreOptions(scale=0.3, window=50, softcap=0.7), True),
    ],
)
@pytest.mark.parametrize("name", ["prefixes of each other", "long segments", "reversed comb", "forest of chains"])
def test_the_kernels_tables_give_attention_forward_and_backward(
    name: str, options: ScoreOptions, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_flash.install(monkeypatch, SMALL)
    layout = layout_of(SHAPES[name])
    sinks = SINKS.clone().requires_grad_() if with_sinks else None
    assert_is_attention(layout, random_inputs(layout.forest.num_tokens), options, sinks)


@pytest.mark.parametrize("head_size", [128, 256])
def test_blocks_of_the_kernels_sizes_are_attention(head_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install(monkeypatch)
    layout = layout_of(star(4, prompt=150, response=70))
    assert_is_attention(
        layout, random_inputs(layout.forest.num_tokens, (2, 1), head_size), ScoreOptions(scale=0.1, window=160)
    )


@given(sequences=sequence_sets(), window=st.none() | st.integers(1, 12))
@settings(max_examples=25)
def test_random_forests_are_attention(sequences: list[list[int]], window: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fake_flash.install(patch, (5, 3))
        layout = layout_of(sequences)
        assert_is_attention(layout, random_inputs(layout.forest.num_tokens), ScoreOptions(scale=0.3, window=window))


@pytest.mark.parametrize("sinks", [None, SINKS])
def test_the_operations_tell_torch_their_shapes_strides_and_derivative(
    sinks: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_flash.install(monkeypatch)
    tables = FlashTables.of(layout_of([[0] * 9, [0] * 4 + [1] * 3]), None, SMALL)
    # Transpose the inputs, because the package gives gradients the strides of its inputs.
    rows = [tensor.detach().bfloat16().transpose(1, 2).requires_grad_() for tensor in random_inputs(12)]
    leaf = None if sinks is None else sinks.float().requires_grad_()
    options: tuple[Any, ...] = (tables.ranges, tables.by_query, tables.by_key, list(SMALL), 0.3, 0.0)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(flash_forward, (*rows, leaf, *options), test_utils=checks)
    out, lse = (tensor.detach() for tensor in flash_forward(*rows, leaf, *options))
    inputs = [tensor.detach() for tensor in rows]
    backward = (out.clone(), *inputs, out, lse, None if leaf is None else leaf.detach(), *options)
    torch.library.opcheck(flash_backward, backward, test_utils=("test_schema", "test_faketensor"))


def test_a_compiled_layer_holds_both_passes_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install(monkeypatch)
    torch._dynamo.reset()
    torch.manual_seed(0)
    project = torch.nn.Linear(16, 4 * 8, dtype=torch.float64)

    def layer(hidden: Tensor, sinks: Tensor, tables: FlashTables) -> Tensor:
        query = project(hidden).view(1, -1, 4, 8)
        key = query[:, :, ::2]
        lists = (tables.ranges, tables.by_query, tables.by_key, [8, 6])
        out, _ = flash_forward(query, key, key * 2, sinks, *lists, 0.3, 2.0)
        return torch.nn.functional.silu(out.flatten(2))

    # With fullgraph, a graph break raises.
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    layout = layout_of(SHAPES["long segments"])
    hidden = torch.randn(1, layout.forest.num_tokens, 16, dtype=torch.float64, requires_grad=True)
    sinks = SINKS.clone().requires_grad_()
    results = []
    for run in (layer, compiled):
        out = run(hidden, sinks, FlashTables.of(layout, 9, SMALL))
        results.append([out, *torch.autograd.grad(out.sin().sum(), [hidden, sinks, project.weight])])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)
    torch._dynamo.reset()
