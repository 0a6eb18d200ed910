"""Products with few rows, in triton's interpreter, against float64; and the choice of kernels."""

from collections.abc import Callable, Sequence

import pytest
import torch

from tests.engine.decoder.cuda_cases import INTERPRETED_ONLY, batch_of
from tests.engine.decoder.test_cuda_decoder import FILLING, GROWING, NUM_SLOTS, assert_close, wanting, weights_of
from tests.models import VOCAB, build
from treering.engine.decoder.reference import TorchDecoder
from treering.engine.decoder.weights import DecoderWeights

linear_module = pytest.importorskip("treering.engine.decoder.cuda.linear")
products_module = pytest.importorskip("treering.engine.decoder.cuda.products")
pytestmark = INTERPRETED_ONLY
CudaDecoder = pytest.importorskip("treering.engine.decoder.cuda.decoder").CudaDecoder
LinearTile = linear_module.LinearTile

EPSILON = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
"""Half a unit in the last place, of 1; of bfloat16 a whole one, since the interpreter cuts off instead of rounding."""


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: LinearTile) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=x.dtype)
    parts = None if tile.parts == 1 else torch.full((tile.parts, *out.shape), torch.nan)
    linear_module.linear(x, weight, bias, out, tile, parts)
    return out


def assert_rounded_once(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Checks the error bound of float32 sums in any order with one rounding."""
    wide, absolute = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        wide, absolute = wide + bias.double(), absolute + bias.double().abs()
    summed = absolute * (x.shape[1] + 1) * 2.0**-24
    assert ((out.double() - wide).abs() <= summed + EPSILON[out.dtype] * (wide.abs() + summed)).all()


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 33, 64])
@pytest.mark.parametrize("tile", [LinearTile(16, 1), LinearTile(64, 1), LinearTile(32, 4)], ids=str)
def test_a_product_is_that_of_float64_rounded_once(num_tokens: int, tile: LinearTile) -> None:
    x, weight, bias = (numbers(*shape, dtype=torch.bfloat16) for shape in ((num_tokens, 520), (70, 520), (70,)))
    assert_rounded_once(product(x, weight, None, tile), x, weight)
    assert_rounded_once(product(x, weight, bias, tile), x, weight, bias)


Seconds = dict[int, tuple[float, float, float]]
"""Of torch and of both tiles, by the columns of a matrix."""


def play_clock(monkeypatch: pytest.MonkeyPatch, seconds: Seconds) -> list[tuple[int, int]]:
    """Fakes the timing; returns a list that receives the columns and number of matrices of each timing."""
    timed: list[tuple[int, int]] = []
    columns: list[int] = []

    def seconds_of(works: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
        columns.clear()
        works[0]()
        timed.append((columns[0], len(columns)))
        return [*seconds[columns[0]]][: len(works)]

    monkeypatch.setattr(products_module, "torch_product", lambda name, x, weight, *_: columns.append(weight.shape[0]))
    monkeypatch.setattr(products_module, "seconds_of", seconds_of)
    return timed


@pytest.fixture(scope="module")
def weights() -> DecoderWeights:
    """Matrices of 80 (qkv), 48 (out and down), 128 (gate and up) and 32 columns (head)."""
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 3, "num_key_value_heads": 1}
    return weights_of(build("qwen3", **sizes, head_dim=16).bfloat16())


def test_the_fastest_is_chosen_once_for_each_matrix_and_number_of_tokens(
    weights: DecoderWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A kernel that exceeds the device's limits takes forever, and gains below 2 % do not count.
    seconds = {80: (2.0, 1.0, 1.5), 48: (2.0, 1.5, 1.0), 128: (2.0, 1.97, 3.0), VOCAB: (1.0, 2.0, float("inf"))}
    assert [weights.layers[0].qkv.shape[0], weights.layers[0].gate_up.shape[0]] == [80, 128]
    timed = play_clock(monkeypatch, seconds)
    monkeypatch.setattr(products_module, "_may_time", lambda device: True)
    products = products_module.Products(weights, "measured")
    products.for_tokens(4)
    wide, narrow = "64 columns", "32 columns"
    chosen = {"qkv": wide, "out": narrow, "gate_up": "torch", "down": narrow, "head": "torch"}
    assert products.chosen == {4: chosen}
    # All layers' matrices of a name are timed together.
    assert timed == [(80, 2), (48, 2), (128, 2), (48, 2), (VOCAB, 1)]
    products.for_tokens(4)
    assert len(timed) == 5
    products.for_tokens(2)
    assert products.chosen == {4: chosen, 2: chosen}
    assert len(timed) == 10


@pytest.mark.parametrize("by", ["measured", "torch"])
def test_without_a_device_or_switched_off_torch_computes_untimed(
    weights: DecoderWeights, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products_module, "seconds_of", None)
    monkeypatch.setattr(products_module, "_may_time", products_module._may_time if by == "measured" else lambda _: True)
    products = products_module.Products(weights, by)
    products.for_tokens(1)
    assert {*products.chosen[1].values()} == {"torch"}


def test_no_clock_decides_under_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products_module, "INTERPRETED", False)
    assert products_module._may_time(torch.device("cuda", 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not products_module._may_time(torch.device("cuda", 0))


def test_passes_with_our_products_give_the_logits_of_the_plain_decoder(weights: DecoderWeights) -> None:
    batches = [batch_of(rows, VOCAB) for rows in (FILLING, GROWING)]
    decoders = CudaDecoder(weights, NUM_SLOTS, "kernel"), TorchDecoder(weights, NUM_SLOTS)
    assert_close(*([decoder.run(batch).clone() for batch in batches] for decoder in decoders), 0.05)
    assert {kernel for chosen in decoders[0].products.chosen.values() for kernel in chosen.values()} == {"64 columns"}


def test_a_pass_that_is_not_captured_is_computed_by_torch_whatever_was_captured_before(
    weights: DecoderWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    (growing,) = (batch_of(GROWING, VOCAB),)
    started = wanting(growing, [0, 1])
    decoder, other = (CudaDecoder(weights, NUM_SLOTS, "kernel") for _ in range(2))
    decoder.run(growing)
    assert torch.equal(decoder.run(started), other.run(started))
    monkeypatch.setattr(products_module, "linear", None)
    other.run(started)
