"""On a CUDA device flex, triton and flash equal the reference, with the tiles and blocks that users get."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.attention.given import assert_partitions_equal_the_tree, layout_of, random_inputs, results
from tests.forests import SHAPES, bushy, comb, star
from treering.attention import Backend, ScoreOptions, attend
from treering.attention.flash import flash_version
from treering.tree.forest import Forest
from treering.tree.partition import Partition

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Torch's compiler and triton emit unrelated warnings.
    pytest.mark.filterwarnings("default"),
]

CUDA = torch.device("cuda")
BACKENDS: tuple[Backend, ...] = ("flex", "triton")
WITH_FLASH: tuple[Backend, ...] = (*BACKENDS, "flash") if flash_version() else BACKENDS
OPTIONS = {
    "plain": ScoreOptions(scale=0.1),
    "window of 1": ScoreOptions(scale=0.1, window=1),
    "window of 150": ScoreOptions(scale=0.1, window=150),
    "softcap": ScoreOptions(scale=0.1, softcap=2.0),
    "window and softcap": ScoreOptions(scale=0.1, window=60, softcap=2.0),
}
FORESTS: dict[str, list[list[int]]] = {
    "one token": [[1]],
    "chain": [[1] * 1000],
    "prompt and responses": [[0] * 700 + [1 + i] * 300 for i in range(5)],
    "bushy": bushy(60),
    "comb": comb(300),
    "star": star(300, prompt=200, response=5),
    "chains": SHAPES["forest of chains"],
}


def assert_equal_with_gradients(
    sequences: list[list[int]],
    options: ScoreOptions,
    backend: Backend,
    *,
    dtype: torch.dtype = torch.bfloat16,
    with_sinks: bool = False,
    heads: tuple[int, int] = (4, 2),
    size: int = 64,
) -> None:
    layout = layout_of(sequences, CUDA)
    inputs = random_inputs(layout.forest.num_tokens, heads, size, dtype, CUDA)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    sinks = torch.linspace(-1, 2, heads[0], device=CUDA).to(dtype).requires_grad_() if with_sinks else None
    exact_sinks = None if sinks is None else sinks.detach().double().requires_grad_()
    got = results(partial(attend, backend=backend), inputs, sinks, layout=layout, options=options)
    wanted = results(partial(attend, backend="reference"), exact, exact_sinks, layout=layout, options=options)
    # Weights, gradients of scores and results are each rounded to the dtype once. Products of float32 are three of
    # tf32, whose dropped terms are of the order of 2^-22.
    tolerance = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.dtype == dtype
        assert float((mine.double() - theirs).norm()) <= tolerance * max(1e-3, float(theirs.norm()))


@pytest.mark.parametrize("backend", WITH_FLASH)
@pytest.mark.parametrize("name", FORESTS)
def test_every_shape_equals_the_reference(name: str, backend: Backend) -> None:
    assert_equal_with_gradients(FORESTS[name], OPTIONS["plain"], backend)


@pytest.mark.parametrize("backend", WITH_FLASH)
@pytest.mark.parametrize("options", OPTIONS)
def test_each_option_with_sinks_equals_the_reference(options: str, backend: Backend) -> None:
    assert_equal_with_gradients(FORESTS["prompt and responses"], OPTIONS[options], backend, with_sinks=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [16, 64, 80, 96, 128, 256])
def test_head_sizes_equal_the_reference(size: int, dtype: torch.dtype) -> None:
    assert_equal_with_gradients(FORESTS["bushy"], OPTIONS["plain"], "triton", dtype=dtype, size=size)


@pytest.mark.skipif(flash_version() is None, reason="needs flash-attn-4")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 96, 128, 160, 192, 256])
def test_head_sizes_of_flash_equal_the_reference(size: int, dtype: torch.dtype) -> None:
    largest = 256 if torch.cuda.get_device_capability()[0] == 9 else 128
    if size > largest:
        pytest.skip(f"the kernels of this device take heads of at most {largest}")
    assert_equal_with_gradients(FORESTS["bushy"], OPTIONS["window and softcap"], "flash", dtype=dtype, size=size)


@pytest.mark.parametrize("size", [64, 128])
def test_float32_equals_the_reference(size: int) -> None:
    assert_equal_with_gradients(FORESTS["bushy"], OPTIONS["plain"], "triton", dtype=torch.float32, size=size)


@pytest.mark.parametrize("backend", [name for name in WITH_FLASH if name != "flex"])
@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (6, 2)])
def test_query_heads_share_key_heads(heads: tuple[int, int], backend: Backend) -> None:
    assert_equal_with_gradients(FORESTS["star"], OPTIONS["plain"], backend, heads=heads)


@pytest.mark.parametrize("deterministic", [False, True])
def test_triton_gradients_are_the_same_bits_every_time(deterministic: bool) -> None:
    layout = layout_of([[0] * 600 + [1 + i] * 200 for i in range(40)], CUDA)
    inputs = random_inputs(layout.forest.num_tokens, (8, 2), 128, torch.bfloat16, CUDA)
    run = partial(attend, layout=layout, options=OPTIONS["plain"], backend="triton")
    torch.use_deterministic_algorithms(deterministic)
    try:
        first, second = (results(run, inputs, None) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", WITH_FLASH)
@pytest.mark.parametrize("window", [None, 500])
def test_gradients_through_gateways_equal_those_of_the_whole_tree(backend: Backend, window: int | None) -> None:
    tree = Forest.from_sequences([[0] * 600 + [1] * 300, [0] * 600 + [2] * 400])
    ranges = ((0, 450, -1), (450, tree.num_tokens, 0))
    parts = tuple(Partition(tokens=np.arange(i, j, dtype=np.int32), parent=above) for i, j, above in ranges)
    dtype = torch.bfloat16 if backend == "flash" else torch.float32
    # In 16 bits the children's gradients are rounded once more.
    tolerance = 1e-5 if dtype == torch.float32 else 6 * torch.finfo(dtype).eps
    inputs = random_inputs(tree.num_tokens, (4, 2), 64, dtype, CUDA)
    assert_partitions_equal_the_tree(inputs, tree, parts, backend, ScoreOptions(scale=0.1, window=window), tolerance)
