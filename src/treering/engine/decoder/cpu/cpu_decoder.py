"""Decode on CPU with torch's matrix products into preallocated buffers and one compiled loop between them.

A small model's step is dominated by operation launches; this path launches eight per layer instead of forty.

    T tokens   S slots   C hidden size   F MLP size   H query heads   G key-value heads   D head size
"""

import math
import mmap

import numpy as np
import torch
from torch import Tensor

from treering.arrays import Int64Array
from treering.engine.batch.token_batch import TokenBatch
from treering.engine.decoder.cpu.kernels import attend, move_slots, rms_norm, silu_mul, write_keys
from treering.engine.decoder.cpu.simd import lanes_of
from treering.engine.decoder.decoder_weights import DecoderWeights, LayerWeights, activation_widths
from treering.engine.decoder.plain_decoder import Decoder

_CACHE_LINE = 64
_MOST_DRAFTS = 64
_MOST_LAID_OUT = 1 << 20
"""Largest matrix in bytes that `_transposed` transposes in memory."""


class CpuDecoder(Decoder):
    """Decoder for float32 or float64 weights on CPU."""

    def __init__(self, weights: DecoderWeights, num_slots: int) -> None:
        """Allocate an arena of `num_slots` and a spare slot."""
        sizes = weights.sizes
        dtype = weights.embedding.numpy().dtype
        lanes = lanes_of(dtype)
        # Attention reads whole vectors, even past the last slot.
        row = _padded_row_length(num_slots + 1 + lanes, dtype.itemsize)
        padded = -(-sizes.head_size // lanes) * lanes
        self._weights = weights
        self._num_slots = num_slots
        per_layer = (sizes.num_layers, sizes.num_kv_heads)
        shapes = [(*per_layer, sizes.head_size, row), (*per_layer, num_slots + 1, padded)]
        # Mapped zeros take memory as they are written, 4 KB at a time. numpy's are backed by pages of 2 MB, so that the
        # first slot of every row of keys would take the whole arena.
        pages = [mmap.mmap(-1, math.prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY) for shape in shapes]
        self._keys, self._values = [
            np.frombuffer(page, dtype).reshape(shape) for page, shape in zip(pages, shapes, strict=True)
        ]
        self._scores = np.zeros((2, sizes.num_positions + _MOST_DRAFTS + 4 * lanes), dtype)
        self._eps = np.array([sizes.eps], dtype)
        self._scale = np.array([sizes.head_size**-0.5], dtype)
        self._rotation = weights.cos.numpy(), weights.sin.numpy()
        self._layers = [_Layer(layer) for layer in weights.layers]
        self._norm = weights.norm.numpy()
        self._head = _transposed(weights.head)
        self._buffers = _Buffers(weights, num_tokens=64)

    @property
    def spare_slot(self) -> int:
        """The last slot, which nothing reads."""
        return self._num_slots

    @torch.inference_mode()
    def run(self, batch: TokenBatch) -> Tensor:
        """Write the batch's keys and values and return logits [W, V], valid until the next run."""
        if batch.num_tokens > self._buffers.num_tokens:
            self._buffers = _Buffers(self._weights, num_tokens=2 * batch.num_tokens)
        views = self._buffers.first(batch.num_tokens)
        torch.index_select(self._weights.embedding, 0, torch.from_numpy(batch.tokens), out=views.x)
        for index, layer in enumerate(self._layers):
            self._attention(index, layer, batch, views)
            self._mlp(layer, views)
        last = views.x[torch.from_numpy(batch.wanted)]
        rms_norm(last.numpy(), self._norm, self._eps, last.numpy())
        return _linear(last, self._head, self._weights.head_bias, self._buffers.logits(last.shape[0]))

    def move(self, sources: Int64Array, targets: Int64Array) -> None:
        """Copy keys and values between slots, in order."""
        move_slots(self._keys, self._values, sources, targets)

    def _attention(self, index: int, layer: "_Layer", batch: TokenBatch, views: "_Views") -> None:
        rms_norm(views.x_np, layer.input_norm, self._eps, views.h_np)
        _linear(views.h, layer.qkv, layer.qkv_bias, views.qkv)
        keys, values = self._keys[index], self._values[index]
        write_keys(
            views.qkv_np,
            layer.q_norm,
            layer.k_norm,
            self._eps,
            *self._rotation,
            batch.positions,
            batch.slots,
            keys,
            values,
        )
        spans = batch.prefix_start, batch.num_prefix, batch.own_start, batch.num_own, batch.tree_start, batch.tree_bits
        attend(views.qkv_np, keys, values, *spans, self._scale, self._scores, views.attended_np)
        _add_linear(views.x, views.attended, layer.out, layer.out_bias)

    def _mlp(self, layer: "_Layer", views: "_Views") -> None:
        rms_norm(views.x_np, layer.mlp_norm, self._eps, views.h_np)
        _linear(views.h, layer.gate_up, layer.gate_up_bias, views.gate_up)
        silu_mul(views.gate_up_np, views.gated_np)
        _add_linear(views.x, views.gated, layer.down, layer.down_bias)


class _Layer:
    """Weights of a layer: matrices [in, out] for torch, norm vectors as arrays for the loops."""

    def __init__(self, layer: LayerWeights) -> None:
        empty = np.zeros(0, layer.input_norm.numpy().dtype)
        self.input_norm, self.mlp_norm = layer.input_norm.numpy(), layer.mlp_norm.numpy()
        self.q_norm = empty if layer.q_norm is None else layer.q_norm.numpy()
        self.k_norm = empty if layer.k_norm is None else layer.k_norm.numpy()
        self.qkv, self.out = _transposed(layer.qkv), _transposed(layer.out)
        self.gate_up, self.down = _transposed(layer.gate_up), _transposed(layer.down)
        self.qkv_bias, self.out_bias = layer.qkv_bias, layer.out_bias
        self.gate_up_bias, self.down_bias = layer.gate_up_bias, layer.down_bias


class _Views:
    """First rows of the buffers, as tensors and as numpy arrays over the same memory."""

    def __init__(self, buffers: dict[str, Tensor], num_tokens: int) -> None:
        views = {name: buffer[:num_tokens] for name, buffer in buffers.items()}
        self.x, self.h, self.qkv, self.attended = (views[name] for name in ("x", "h", "qkv", "attended"))
        self.gate_up, self.gated = views["gate_up"], views["gated"]
        self.x_np, self.h_np, self.qkv_np, self.attended_np = (
            tensor.numpy() for tensor in (self.x, self.h, self.qkv, self.attended)
        )
        self.gate_up_np, self.gated_np = self.gate_up.numpy(), self.gated.numpy()


class _Buffers:
    """Preallocated activations of a layer, so that a pass allocates only the rows whose logits it computes."""

    def __init__(self, weights: DecoderWeights, *, num_tokens: int) -> None:
        # The CPU path adds updates directly to x.
        widths = {name: width for name, width in activation_widths(weights.sizes).items() if name != "update"}
        self.num_tokens = num_tokens
        self._tensors = {name: _padded_zeros(num_tokens, width, weights.dtype) for name, width in widths.items()}
        self._logits = torch.zeros(0, weights.head.shape[0], dtype=weights.dtype)
        self._views: dict[int, _Views] = {}

    def first(self, num_tokens: int) -> _Views:
        """Return views of the first `num_tokens` rows, cached by `num_tokens`."""
        views = self._views.get(num_tokens)
        if views is None:
            views = self._views[num_tokens] = _Views(self._tensors, num_tokens)
        return views

    def logits(self, num_rows: int) -> Tensor:
        """Return the first `num_rows` rows of the logits buffer."""
        if num_rows > self._logits.shape[0]:
            self._logits = self._logits.new_zeros(2 * num_rows, self._logits.shape[1])
        return self._logits[:num_rows]


def _padded_zeros(num_tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return zeros [num_tokens, width] with a spare vector at the end for the compiled loops."""
    spare = lanes_of(np.dtype(str(dtype).removeprefix("torch.")))
    return torch.zeros(num_tokens * width + spare, dtype=dtype)[: num_tokens * width].view(num_tokens, width)


@torch.inference_mode()
def _transposed(matrix: Tensor) -> Tensor:
    """Return a snapshot's matrix [out, in] as a view [in, out]; transpose a small one in memory, in place.

    The next `DecoderWeights.read` fills the same memory. Transposing halves the time of some products with few rows;
    for matrices larger than a core's cache, products with two rows would get slower.
    """
    if matrix.nbytes <= _MOST_LAID_OUT:
        turned = matrix.T.contiguous()
        matrix.set_(turned.untyped_storage(), 0, matrix.shape, turned.T.stride())
    return matrix.T


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)


def _add_linear(x: Tensor, update: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    x.addmm_(update, weight)
    if bias is not None:
        x.add_(bias)


def _padded_row_length(num_slots: int, itemsize: int) -> int:
    """Return the row length of the keys: an odd number of cache lines, so that the D rows use different cache sets."""
    per_line = _CACHE_LINE // itemsize
    num_lines = -(-num_slots // per_line)
    return (num_lines | 1) * per_line


def supports(weights: DecoderWeights) -> bool:
    """Return whether the fused decoder supports these weights: float32 or float64 on CPU."""
    return weights.device.type == "cpu" and weights.embedding.dtype in (torch.float32, torch.float64)
