"""The decoder for CUDA: matrix products and our own kernels, captured in one CUDA graph per size and replayed.

Passes whose logits are all wanted (decoding and verifying drafts) use a graph per bucket of tokens and tiles; passes
with prefill chunks launch their kernels one by one.

    T tokens   W wanted ones   I tiles   V vocabulary
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.engine.batch.token_batch import TokenBatch
from treering.engine.decoder.cuda.attention import attend
from treering.engine.decoder.cuda.buffers import Buffers
from treering.engine.decoder.cuda.device import Staging, StagingBuffer, capture, no_grad_mode, on_device, padded_bytes
from treering.engine.decoder.cuda.layers import add_norm, gate, rotate_and_write
from treering.engine.decoder.cuda.passes import (
    ROWS_OF_TILES,
    TILE_COLUMNS,
    TOKEN_COLUMNS,
    PassTables,
    bucket,
    plan_tables,
)
from treering.engine.decoder.cuda.products import Product, Products, ProductsBy, torch_product
from treering.engine.decoder.protocol import Decoder
from treering.engine.decoder.weights import DecoderWeights, LayerWeights

MAX_CAPTURED = 1024
"""Most tokens of a captured pass; beyond, launch time is negligible."""

_PassKey = tuple[int, int, int]


class CudaDecoder(Decoder):
    """Forward passes with float32, bfloat16 or float16 weights.

    Attributes:
        products: the kernel chosen for each matrix product of a captured pass.
    """

    @no_grad_mode()
    def __init__(self, weights: DecoderWeights, num_slots: int, products: ProductsBy = "measured") -> None:
        """Allocates `num_slots` and a spare slot that nothing reads."""
        sizes, device = weights.sizes, weights.device
        self.products = Products(weights, products)
        self._weights, self._num_slots = weights, num_slots
        shape = (sizes.num_layers, sizes.num_kv_heads, num_slots + 1, sizes.head_size)
        self._keys = torch.zeros(shape, dtype=weights.dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        self._buffers: dict[int, Buffers] = {}
        self._captured: dict[_PassKey, tuple[StagingBuffer, Callable[[], None]]] = {}
        self._staging = Staging(device)

    @property
    def spare_slot(self) -> int:
        """See `Decoder.spare_slot`: the last one; padding tokens of a bucket write there too."""
        return self._num_slots

    @no_grad_mode()
    def run(self, batch: TokenBatch) -> Tensor:
        """See `Decoder.run`."""
        sizes = self._weights.sizes
        tables = plan_tables(batch, sizes.num_heads // sizes.num_kv_heads)
        is_whole = batch.wanted.size == batch.num_tokens
        with on_device(self._weights.device):
            if is_whole and 0 < batch.num_tokens <= MAX_CAPTURED:
                return self._replay(tables)[: batch.num_tokens]
            return self._launch(tables, batch.wanted)

    @no_grad_mode()
    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """See `Decoder.move`; reads all sources before it writes any target, which is equivalent under its rules."""
        with on_device(self._weights.device):
            source, target = self._staging.send([sources, targets])
            for cache in (self._keys, self._values):
                cache.index_copy_(2, target, cache.index_select(2, source))

    def _replay(self, tables: PassTables) -> Tensor:
        num_tokens, num_tiles = bucket(tables.tokens.shape[1]), bucket(tables.tiles.shape[0])
        arrays = self._padded(tables, num_tokens, num_tiles)
        key = (num_tokens, num_tiles, tables.rows)
        buffers = self._buffers_for(num_tokens)
        logits = buffers.logits[:num_tokens]
        if key not in self._captured:
            staging = StagingBuffer(self._weights.device, sum(padded_bytes(array.nbytes) for array in arrays))
            tokens, tiles = staging.send(arrays)
            product = self.products.for_tokens(num_tokens)
            work = partial(self._pass, product, buffers, tokens, tiles, None, logits, tables.rows)
            self._captured[key] = staging, capture(work, self._weights.device)
        staging, replay = self._captured[key]
        staging.send(arrays)
        replay()
        return logits

    def _launch(self, tables: PassTables, wanted: NDArray[np.int64]) -> Tensor:
        buffers = self._buffers_for(tables.tokens.shape[1])
        tokens, tiles, wanted_on_device = self._staging.send([tables.tokens, tables.tiles, wanted])
        head = self._weights.head
        logits = torch.empty(wanted.size, head.shape[0], dtype=head.dtype, device=head.device)
        self._pass(torch_product, buffers, tokens, tiles, wanted_on_device, logits, tables.rows)
        return logits

    def _padded(self, tables: PassTables, num_tokens: int, num_tiles: int) -> list[NDArray[np.int64]]:
        """The tables padded to a bucket, with tokens that see nothing and empty tiles."""
        tokens, tiles = np.zeros((TOKEN_COLUMNS, num_tokens), np.int64), np.zeros((num_tiles, TILE_COLUMNS), np.int64)
        tokens[2] = self._num_slots
        tokens[:, : tables.tokens.shape[1]] = tables.tokens
        tiles[: tables.tiles.shape[0]] = tables.tiles
        return [tokens, tiles]

    def _pass(
        self,
        product: Product,
        buffers: Buffers,
        tokens: Tensor,
        tiles: Tensor,
        wanted: Tensor | None,
        logits: Tensor,
        rows: int,
    ) -> None:
        """Launches all kernels of a pass and writes the logits of the wanted tokens (None: all)."""
        weights, eps = self._weights, self._weights.sizes.eps
        num_tokens = tokens.shape[1]
        views = buffers.first(num_tokens, tiles.shape[0])
        torch.index_select(weights.embedding, 0, tokens[0], out=views.x)
        update: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            add_norm(views.x, update, layer.input_norm, views.h, eps)
            product("qkv", views.h, layer.qkv, layer.qkv_bias, views.qkv)
            keys, values = self._keys[index], self._values[index]
            rotation = weights.cos, weights.sin
            rotate_and_write(views.qkv, _norms(layer), rotation, keys, values, tokens, eps)
            attend(views.qkv, keys, values, tokens, tiles, views.parts, views.lse, views.attended, rows=rows)
            product("out", views.attended, layer.out, layer.out_bias, views.update)
            add_norm(views.x, views.update, layer.mlp_norm, views.h, eps)
            product("gate_up", views.h, layer.gate_up, layer.gate_up_bias, views.gate_up)
            gate(views.gate_up, views.gated)
            product("down", views.gated, layer.down, layer.down_bias, views.update)
            update = views.update
        add_norm(views.x, update, weights.norm, views.h, eps)
        product("head", views.h if wanted is None else views.h[wanted], weights.head, weights.head_bias, logits)

    def _buffers_for(self, num_tokens: int) -> Buffers:
        """Buffers for `num_tokens` rounded up to a power of two, kept at a fixed address."""
        size = 1 << (num_tokens - 1).bit_length()
        if size not in self._buffers:
            self._buffers[size] = Buffers(self._weights, num_tokens=size)
        return self._buffers[size]


def _norms(layer: LayerWeights) -> tuple[Tensor, Tensor] | None:
    return None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)


def unsupported_reason(weights: DecoderWeights) -> str | None:
    """Why the kernels do not support these weights, as the end of a sentence; None if they do.

    Example: float64 weights give "computes float32, bfloat16 and float16, and the model is torch.float64".
    """
    from treering.attention.triton.ops import INTERPRETED

    sizes, dtype = weights.sizes, weights.dtype
    if weights.device.type != "cuda" and not INTERPRETED:
        return f"computes on CUDA devices, and the model is on {weights.device}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"computes float32, bfloat16 and float16, and the model is {dtype}"
    if sizes.head_size > 128 or sizes.head_size % 2:
        return f"computes even head sizes up to 128, and the model has {sizes.head_size}"
    num_groups = sizes.num_heads // sizes.num_kv_heads
    if num_groups > ROWS_OF_TILES[-1]:
        return f"computes up to {ROWS_OF_TILES[-1]} query heads per key head, and the model has {num_groups}"
    return None
