"""The kernels, in triton's interpreter, equal the reference in outputs and gradients for every option."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.given import (
    assert_a_token_changes_only_its_descendants,
    assert_close,
    in_partitions,
    layout_of,
    random_inputs,
    results,
)
from tests.forests import SHAPES, bushy, comb, sequence_sets, star
from tests.partitions import random_partitions
from treering.attention import ScoreOptions
from treering.attention import triton as backend
from treering.attention import triton_tables as tables
from treering.attention.dispatch import OFF_SWITCH, reference_attention
from treering.attention.triton import triton_attention
from treering.attention.triton_tables import Tiles, TileSize
from treering.errors import UnsupportedError
from treering.tree.forest import Forest

pytest.importorskip("triton")
launch = pytest.importorskip("treering.attention.triton_launch")
pytestmark = pytest.mark.skipif(
    not launch.INTERPRETED, reason="the kernels are compiled here; test_gpu_attention holds them to the same laws"
)

SMALL = Tiles(forward=TileSize(16, 16), query_gradient=TileSize(16, 16), key_gradient=TileSize(16, 16))
UNEVEN = Tiles(forward=TileSize(32, 16), query_gradient=TileSize(16, 32), key_gradient=TileSize(16, 32))
OPTIONS = {
    "plain": ScoreOptions(scale=0.3),
    "window of 20": ScoreOptions(scale=0.3, window=20),
    "window and softcap": ScoreOptions(scale=0.3, window=9, softcap=0.7),
}
FORESTS: dict[str, list[list[int]]] = {
    "one token": [[1]],
    "prompt and responses": [[0] * 35 + [1 + i] * 17 for i in range(2)],
    "bushy": bushy(4),
    "comb": comb(18),
    "star": star(20, prompt=20, response=2),
    "chains": SHAPES["forest of chains"][:3],
}


def assert_equal_with_gradients(
    sequences: list[list[int]],
    options: ScoreOptions,
    *,
    tiles: Tiles | None = SMALL,
    with_sinks: bool = False,
    heads: tuple[int, int] = (2, 1),
    size: int = 16,
) -> None:
    layout = layout_of(sequences)
    inputs = random_inputs(layout.forest.num_tokens, heads, size)
    sinks = torch.linspace(-1, 2, heads[0], dtype=torch.float64).requires_grad_() if with_sinks else None
    ways = (partial(triton_attention, tiles=tiles), reference_attention)
    assert_close(*(results(run, inputs, sinks, layout=layout, options=options) for run in ways))


@given(sequences=sequence_sets(max_sequences=6), options=st.sampled_from(sorted(OPTIONS)), with_sinks=st.booleans())
@settings(max_examples=4)
def test_random_forests_equal_the_reference(sequences: list[list[int]], options: str, with_sinks: bool) -> None:
    assert_equal_with_gradients(sequences, OPTIONS[options], with_sinks=with_sinks)


@pytest.mark.parametrize("name", FORESTS)
def test_every_shape_equals_the_reference(name: str) -> None:
    assert_equal_with_gradients(FORESTS[name], OPTIONS["plain"])


@pytest.mark.parametrize("options", OPTIONS)
def test_each_option_equals_the_reference_with_sinks(options: str) -> None:
    assert_equal_with_gradients(FORESTS["prompt and responses"], OPTIONS[options], with_sinks=True)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs of the key gradient visit at most two blocks of queries."""
    monkeypatch.setattr(tables, "MIN_TILES", 4)


@pytest.mark.parametrize(
    ("name", "tiles", "min_tiles"),
    [("prompt and responses", UNEVEN, 1), ("star", SMALL, 4), ("prompt and responses", None, tables.MIN_TILES)],
)
def test_however_the_work_is_cut_the_result_is_the_same(
    name: str, tiles: Tiles | None, min_tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MIN_TILES", min_tiles)
    assert_equal_with_gradients(FORESTS[name], OPTIONS["window of 20"], tiles=tiles, with_sinks=True)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(("heads", "size"), [((4, 2), 16), ((2, 1), 20), ((2, 1), 96)])
def test_query_heads_share_key_heads_and_any_head_size_is_padded(heads: tuple[int, int], size: int) -> None:
    assert_equal_with_gradients([[0] * 17 + [1] * 9, [0] * 17 + [2] * 9], OPTIONS["plain"], heads=heads, size=size)


def test_gradients_go_into_gateways_wider_than_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    # The self-check's forest has no gateway.
    monkeypatch.setenv(OFF_SWITCH, "0")
    given_back = []
    whole = backend.scatter_key_gradients
    monkeypatch.setattr(
        backend, "scatter_key_gradients", lambda grads, *rest: given_back.append(grads) or whole(grads, *rest)
    )
    tree = Forest.from_sequences([[0] * 5 + [1] * 3, [0] * 5 + [2] * 3]).trees()[0]
    inputs = random_inputs(tree.num_tokens, dtype=torch.bfloat16)
    in_partitions(inputs, tree, random_partitions(tree, 0, 4), "triton", OPTIONS["plain"])
    assert {grad.dtype for grads in given_back for grad in grads} == {torch.float32}
    assert {tensor.grad.dtype for tensor in inputs if tensor.grad is not None} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_results_are_rounded_once(dtype: torch.dtype) -> None:
    layout = layout_of([[0] * 20 + [1] * 9, [0] * 20 + [2] * 9])
    inputs = random_inputs(layout.forest.num_tokens, (2, 1), dtype=dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    arguments: dict[str, Any] = {"layout": layout, "options": OPTIONS["plain"]}
    ways = (
        results(triton_attention, inputs, None, **arguments),
        results(reference_attention, exact, None, **arguments),
    )
    # Half a unit in the last place for the final rounding of each entry, and another for the backward's saved output,
    # amplified at most by the number of keys that a gradient sums over. Float32 adds its own sums' rounding.
    unit = torch.finfo(dtype).eps
    for got, wanted in zip(*ways, strict=True):
        assert got.dtype == dtype
        assert float((got.double() - wanted).norm()) <= 2 * unit * float(wanted.norm()) + 1e-5 * (unit < 1e-6)


def test_rows_of_any_stride_are_read_and_outputs_run_by_token() -> None:
    layout = layout_of([[0] * 20, [0] * 9 + [1]])
    inputs = random_inputs(layout.forest.num_tokens, (2, 2))
    strided = [tensor.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for tensor in inputs]
    expected = triton_attention(*inputs, layout=layout, options=OPTIONS["plain"], tiles=SMALL)
    out = triton_attention(*strided, layout=layout, options=OPTIONS["plain"], tiles=SMALL)
    assert torch.equal(out, expected)
    assert out.transpose(1, 2).is_contiguous()
    grads = torch.autograd.grad(expected.sum(), inputs)
    # A gradient expanded from one number has strides of 0.
    for got, wanted in zip(torch.autograd.grad(out.sum(), strided), grads, strict=True):
        assert torch.equal(got, wanted)


def test_a_token_changes_only_its_descendants_bitwise() -> None:
    layout = layout_of(FORESTS["prompt and responses"])
    arguments: dict[str, Any] = {"layout": layout, "options": OPTIONS["plain"], "tiles": SMALL}
    assert_a_token_changes_only_its_descendants(lambda inputs: triton_attention(*inputs, **arguments), layout)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("cpu", torch.float32, 64, 0.1), "runs on CUDA, got tensors on cpu: choose segments; to test"),
        (("cuda", torch.float64, 64, 0.1), "bfloat16, float16, float32, not in torch.float64: choose segments"),
        (
            ("cuda", torch.bfloat16, 512, 0.1),
            "at most 256 in torch.bfloat16, got 512: choose flex or segments",
        ),
        (("cuda", torch.float32, 256, 0.1), "heads of at most 128 in torch.float32, got 256"),
        (("cuda", torch.float32, 64, 0.0), "needs a positive scale, got 0.0"),
    ],
)
def test_inputs_that_the_kernels_do_not_take_are_refused(
    values: tuple[str, torch.dtype, int, float], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        backend.check_supported(*values, interpreted=False)


def test_a_missing_triton_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_triton", lambda: False)
    layout = layout_of([[1, 2]])
    with pytest.raises(UnsupportedError, match=r"needs triton \(Linux only\): pip install 'triton>=3.6', or"):
        triton_attention(*random_inputs(2), layout=layout, options=OPTIONS["plain"])
