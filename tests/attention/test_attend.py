"""Every backend equals attention along each path; nothing leaks, nothing is N x N."""

from typing import Any, Protocol

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention import given
from tests.attention.given import layout_of
from tests.backends import EXACT_BACKENDS
from tests.forests import SHAPES, bushy, comb, sequence_sets, star
from tests.largest_tensor import LargestTensor
from treering.attention import ScoreOptions, TreeLayout, attend
from treering.attention.segments import Plain, segment_attention
from treering.errors import ConfigError, InputError, StateError

NUM_HEADS, NUM_KEY_HEADS, HEAD_SIZE = 4, 2, 8
SCALE = 0.3
DEFAULT = ScoreOptions(scale=SCALE)
OPTIONS = {
    "plain": DEFAULT,
    "window of 1": ScoreOptions(scale=SCALE, window=1),
    "window of 3": ScoreOptions(scale=SCALE, window=3),
    "window of 20": ScoreOptions(scale=SCALE, window=20),
    "window of 47": ScoreOptions(scale=SCALE, window=47),
    "softcap": ScoreOptions(scale=SCALE, softcap=0.7),
    "window and softcap": ScoreOptions(scale=SCALE, window=5, softcap=0.7),
}
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)


class Attention(Protocol):
    """Signature of an implementation; most tests pass only the inputs."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: TreeLayout,
        options: ScoreOptions = ...,
        sinks: Tensor | None = ...,
    ) -> Tensor: ...


def by_path(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    options: ScoreOptions = DEFAULT,
    sinks: Tensor | None = None,
) -> Tensor:
    """Specify each token's softmax over at most a window of keys, found by walking up its parents."""
    forest = layout.forest
    rows = []
    for token in range(forest.num_tokens):
        path, at = [], token
        while at >= 0 and (options.window is None or len(path) < options.window):
            path.append(at)
            at = int(forest.parent[at])
        heads = []
        for head in range(NUM_HEADS):
            group = head // (NUM_HEADS // NUM_KEY_HEADS)
            scores = key[0, group, path] @ query[0, head, token] * options.scale
            if options.softcap is not None:
                scores = options.softcap * (scores / options.softcap).tanh()
            total = scores.exp().sum() + (0.0 if sinks is None else sinks[head].exp())
            heads.append(scores.exp() / total @ value[0, group, path])
        rows.append(torch.stack(heads))
    return torch.stack(rows, 1)[None]


def backend(name: str) -> Attention:
    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: TreeLayout,
        options: ScoreOptions = DEFAULT,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return attend(q, k, v, layout=layout, options=options, sinks=sinks, backend=name)  # type: ignore[arg-type]

    return run


def plain(
    q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, options: ScoreOptions = DEFAULT, sinks: Tensor | None = None
) -> Tensor:
    # Backward reuses the kernel that forward chose.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treering.attention.segments.choose_kernel", lambda tensor, options: Plain(options.softcap))
        return segment_attention(q, k, v, layout=layout, options=options, sinks=sinks)


IMPLEMENTATIONS: dict[str, Attention] = {
    "reference": backend("reference"),
    "segments": backend("segments"),
    "segments, plain kernel": plain,
}


def random_inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return given.random_inputs(num_tokens, (NUM_HEADS, NUM_KEY_HEADS), HEAD_SIZE, dtype)


def assert_equal_with_gradients(
    actual: Attention,
    expected: Attention,
    layout: TreeLayout,
    tolerance: float,
    options: ScoreOptions = DEFAULT,
    sinks: Tensor | None = None,
) -> None:
    inputs = random_inputs(layout.forest.num_tokens)
    sinks = None if sinks is None else sinks.clone().requires_grad_()
    ways = (given.results(run, inputs, sinks, layout=layout, options=options) for run in (actual, expected))
    given.assert_close(*ways, tolerance=tolerance)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", OPTIONS)
@drawn(sequences=sequence_sets(max_sequences=5, max_extra=30), with_sinks=st.booleans())
@settings(max_examples=15)
def test_each_option_equals_softmax_along_each_path(
    name: str, options: str, sequences: list[list[int]], with_sinks: bool
) -> None:
    sinks = SINKS if with_sinks else None
    assert_equal_with_gradients(IMPLEMENTATIONS[name], by_path, layout_of(sequences), 1e-12, OPTIONS[options], sinks)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_segments_equal_the_reference_in_each_option_on_every_shape(options: str, shape: str) -> None:
    ways = IMPLEMENTATIONS["segments"], IMPLEMENTATIONS["reference"]
    assert_equal_with_gradients(*ways, layout_of(SHAPES[shape]), 1e-12, OPTIONS[options], SINKS)


@pytest.mark.parametrize("window", [30, 300, 700])
@pytest.mark.parametrize(
    "sequences",
    [comb(400), bushy(80), [[1] * 700 + [2 + i] * 400 for i in range(2)]],
    ids=["comb", "bushy", "long"],
)
def test_windows_of_deep_and_long_forests_equal_the_reference(sequences: list[list[int]], window: int) -> None:
    ways = IMPLEMENTATIONS["segments"], IMPLEMENTATIONS["reference"]
    assert_equal_with_gradients(*ways, layout_of(sequences), 1e-12, ScoreOptions(scale=SCALE, window=window))


def test_the_plain_kernel_in_many_row_slices_equals_one_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treering.attention.segments.MAX_SCORE_ENTRIES", 100)
    layout = layout_of(SHAPES["long segments"])
    assert_equal_with_gradients(IMPLEMENTATIONS["segments, plain kernel"], IMPLEMENTATIONS["reference"], layout, 1e-12)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", ["long segments", "comb", "star"])
def test_a_token_changes_only_its_descendants_bitwise(name: str, shape: str) -> None:
    layout = layout_of(SHAPES[shape])
    given.assert_a_token_changes_only_its_descendants(lambda inputs: IMPLEMENTATIONS[name](*inputs, layout), layout)


def dense_in_its_own_dtype(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout) -> Tensor:
    """Run torch's own attention with a dense mask, as a baseline of low-precision error without trees."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=layout.visible(), scale=SCALE, enable_gqa=True
    )


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", ["long segments", "bushy"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_error_is_at_most_twice_that_of_dense_attention(
    dtype: torch.dtype, shape: str, name: str
) -> None:
    layout = layout_of(SHAPES[shape])
    exact = [tensor.detach() for tensor in random_inputs(layout.forest.num_tokens)]
    expected = dense_in_its_own_dtype(*exact, layout)
    low = [tensor.to(dtype) for tensor in exact]
    error = float((IMPLEMENTATIONS[name](*low, layout).double() - expected).norm())
    dense = float((dense_in_its_own_dtype(*low, layout).double() - expected).norm())
    assert 0 < error <= 2 * dense


@pytest.mark.parametrize("name", EXACT_BACKENDS)
def test_autocast_rounds_nothing_inside_attention(name: str) -> None:
    layout = layout_of(SHAPES["bushy"])
    inputs = [tensor.detach().bfloat16() for tensor in random_inputs(layout.forest.num_tokens)]
    expected = IMPLEMENTATIONS[name](*inputs, layout)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(IMPLEMENTATIONS[name](*inputs, layout), expected)


def test_bfloat16_gradients_of_deep_paths_are_summed_wide() -> None:
    """Summing the 24 parts of a query in bfloat16 would give 1.5 times the error of one dense call."""
    layout = layout_of([[1] * 40 * depth + [2 + depth] * 40 for depth in range(1, 25)])
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in random_inputs(layout.forest.num_tokens)]
    same = [tensor.detach().double().requires_grad_() for tensor in low]
    upstream = torch.linspace(-1, 1, low[0].numel()).reshape(low[0].shape).bfloat16()
    expected = torch.autograd.grad(IMPLEMENTATIONS["reference"](*same, layout), same, upstream.double())
    ours = torch.autograd.grad(IMPLEMENTATIONS["segments"](*low, layout), low, upstream)
    dense = torch.autograd.grad(dense_in_its_own_dtype(*low, layout), low, upstream)
    for got, other, wanted in zip(ours, dense, expected, strict=True):
        assert float((got.double() - wanted).norm()) <= 1.25 * float((other.double() - wanted).norm())


def test_second_derivatives_are_refused() -> None:
    layout = layout_of(SHAPES["long segments"])
    inputs = random_inputs(layout.forest.num_tokens)
    loss = IMPLEMENTATIONS["segments"](*inputs, layout).square().sum()
    (gradient,) = torch.autograd.grad(loss, inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("sequences", [comb(1500), star(3000), [[1] * 1500 + [2], [1] * 1500 + [3] * 1500]])
def test_segments_make_no_array_of_n_by_n(sequences: list[list[int]]) -> None:
    layout = layout_of(sequences)
    inputs = random_inputs(layout.forest.num_tokens, torch.float32)
    with LargestTensor() as largest:
        IMPLEMENTATIONS["segments"](*inputs, layout).sum().backward()
    assert 0 < largest.num_entries <= layout.forest.num_tokens * NUM_HEADS * HEAD_SIZE


def test_an_empty_forest_gives_empty_attention() -> None:
    layout = layout_of([])
    for implementation in EXACT_BACKENDS:
        assert backend(implementation)(*random_inputs(0), layout).shape == (1, NUM_HEADS, 0, HEAD_SIZE)


@pytest.mark.parametrize(
    ("wrong", "message"), [({"window": 0}, "window must be an integer"), ({"softcap": -1.0}, "softcap")]
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ScoreOptions(scale=SCALE, **wrong)


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    layout = layout_of([[1, 2, 3]])
    with pytest.raises(InputError, match="4 rows for a forest of 3 tokens"):
        backend("segments")(*random_inputs(4), layout)
    query, key, value = random_inputs(3)
    with pytest.raises(InputError, match="multiple of key heads, got 3 and 2"):
        backend("segments")(query[:, :3], key, value, layout)


def test_a_layout_taken_for_a_mask_by_another_attention_raises() -> None:
    layout = layout_of([[1, 2, 3]])
    query, key, value = random_inputs(3)
    with pytest.raises(StateError, match="call backward\\(\\) inside"):
        torch.nn.functional.scaled_dot_product_attention(query[:, :2], key, value, attn_mask=layout)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="outside tree_attention"):
        query + layout  # type: ignore[operator]
