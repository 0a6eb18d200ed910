"""Chooses the kernel of each matrix product in a captured pass: torch's, or ours in one of two tiles, by timing.

All sum in float32 and round once, so the choice affects rounding only. It is made once per matrix and number of tokens,
before such a pass is captured.

    T tokens   N columns   K depth   P parts of the depth
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from treering.attention.triton.ops import INTERPRETED
from treering.engine.decoder.cuda.device import capture, num_processors
from treering.engine.decoder.cuda.linear import LinearTile, linear, tiles_of
from treering.engine.decoder.weights import DecoderWeights

ProductsBy = Literal["measured", "torch", "kernel"]
"""measured: the fastest on this device; torch's without a device, or with torch's deterministic algorithms, so that no
clock decides. torch: always torch's, the off-switch. kernel: ours wherever supported, for tests."""

Product = Callable[[str, Tensor, Tensor, Tensor | None, Tensor], None]
"""Arguments: the matrix's name, x [T, K], the matrix [N, K], its bias [N] or None, and out [T, N], written."""

_LAYER_MATRICES = ("qkv", "out", "gate_up", "down")
_NUM_ROUNDS = 4
_FLUSH_BYTES = 2**27
"""Bytes written before each timed run to flush the device's cache, which holds no weights in a real pass either."""
_LEAST_GAIN = 0.02
"""Ours must be faster than torch's by this fraction, the error of the timing."""


class _Choice(NamedTuple):
    """A tile, and the buffer of its parts if it has several."""

    tile: LinearTile
    parts: Tensor | None


class Products:
    """The products of a decoder's captured passes.

    Example: if tiles of 32 columns take 10 us for a matrix and 16 tokens, and torch 14 us, `chosen` has
    {16: {"qkv": "32 columns", ...}}.
    """

    def __init__(self, weights: DecoderWeights, by: ProductsBy) -> None:
        """Choices are made by `for_tokens`."""
        self._weights, self._by = weights, by
        self._choices: dict[int, dict[str, _Choice | None]] = {}

    def for_tokens(self, num_tokens: int) -> Product:
        """The product function for captured passes of `num_tokens` tokens; chooses kernels at the first call."""
        if num_tokens not in self._choices:
            names = (*_LAYER_MATRICES, "head")
            self._choices[num_tokens] = {name: self._choose(name, num_tokens) for name in names}
        return partial(_product, self._choices[num_tokens])

    @property
    def chosen(self) -> dict[int, dict[str, str]]:
        """The choices in words, by number of tokens and matrix."""
        return {
            num_tokens: {name: _in_words(choice) for name, choice in choices.items()}
            for num_tokens, choices in self._choices.items()
        }

    def _choose(self, name: str, num_tokens: int) -> _Choice | None:
        device = self._weights.device
        if self._by == "torch" or (self._by == "measured" and not _may_time(device)):
            return None
        matrices = self._matrices(name)
        weight = matrices[0][0]
        tiles = tiles_of(weight, num_tokens, num_processors(device))
        choices = [_Choice(tile, _parts_buffer(tile, num_tokens, weight)) for tile in tiles]
        if self._by == "kernel" or not choices:
            return next(iter(choices), None)
        return _fastest(choices, matrices, num_tokens)

    def _matrices(self, name: str) -> list[tuple[Tensor, Tensor | None]]:
        """Weights and biases with that name, of all layers."""
        weights = self._weights
        if name == "head":
            return [(weights.head, weights.head_bias)]
        return [(getattr(layer, name), getattr(layer, f"{name}_bias")) for layer in weights.layers]


def torch_product(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """The `Product` of torch."""
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


def _product(
    choices: dict[str, _Choice | None], name: str, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    choice = choices[name]
    if choice is None:
        torch_product(name, x, weight, bias, out)
    else:
        linear(x, weight, bias, out, *choice)


def _may_time(device: torch.device) -> bool:
    return device.type == "cuda" and not (INTERPRETED or torch.are_deterministic_algorithms_enabled())


def _fastest(
    choices: Sequence[_Choice], matrices: Sequence[tuple[Tensor, Tensor | None]], num_tokens: int
) -> _Choice | None:
    """The choice that is fastest over all these matrices; None for torch."""
    weight = matrices[0][0]
    # Its own generator, so that timing does not advance anyone else's random numbers.
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(num_tokens, weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    out = torch.empty(num_tokens, weight.shape[0], dtype=weight.dtype, device=weight.device)

    def all_of(choice: _Choice | None) -> None:
        for weight, bias in matrices:
            _product({"": choice}, "", x, weight, bias, out)

    by_torch, *ours = seconds_of([partial(all_of, choice) for choice in (None, *choices)], weight.device)
    least = min(ours)
    return choices[ours.index(least)] if least < (1 - _LEAST_GAIN) * by_torch else None


def seconds_of(works: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
    """The shortest of a few alternating runs of each, with a flushed cache; infinite if it exceeds the device's limits.

    Captures each first: launching kernels one by one would take longer than small products.
    """
    replays = [_captured(work, device) for work in works]
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    rounds = [[_timed(replay, flush) for replay in replays] for _ in range(_NUM_ROUNDS)]
    return [min(times) for times in zip(*rounds, strict=True)]


def _captured(work: Callable[[], None], device: torch.device) -> Callable[[], None] | None:
    try:
        return capture(work, device)
    except OutOfResources:
        return None


def _timed(replay: Callable[[], None] | None, flush: Tensor) -> float:
    if replay is None:
        return float("inf")
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    flush.zero_()
    start.record()
    replay()
    stop.record()
    stop.synchronize()
    milliseconds: float = start.elapsed_time(stop)
    return milliseconds / 1000


def _parts_buffer(tile: LinearTile, num_tokens: int, weight: Tensor) -> Tensor | None:
    if tile.parts == 1:
        return None
    return torch.zeros(tile.parts, num_tokens, weight.shape[0], device=weight.device)


def _in_words(choice: _Choice | None) -> str:
    """For reports.

    Example: "torch", "32 columns" or "32 columns in 2 parts".
    """
    if choice is None:
        return "torch"
    columns, parts = choice.tile
    return f"{columns} columns" if parts == 1 else f"{columns} columns in {parts} parts"
