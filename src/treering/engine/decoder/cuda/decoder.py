"""The decoder for CUDA: matrix products and our own kernels, captured in one CUDA graph per size and replayed.

Passes whose logits are all wanted (decoding and verifying drafts) use a graph per bucket of tokens and tiles; passes
with prefill chunks launch their kernels one by one.

    T tokens   W wanted ones   I tiles   V vocabulary
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.engine.batch.token_batch import TokenBatch
from treering.engine.decoder.cuda.attention import attend
from treering.engine.decoder.cuda.buffers import Buffers
from treering.engine.decoder.cuda.device import Mailbox, capture, on_device, padded_bytes, plain_mode
from treering.engine.decoder.cuda.layers import add_norm, gate, rotate_and_write
from treering.engine.decoder.cuda.paged_spans import PagedAllocator
from treering.engine.decoder.cuda.pages import PAGE_SLOTS
from treering.engine.decoder.cuda.passes import TILE_COLUMNS, TOKEN_COLUMNS, PassTables, bucket, plan_tables
from treering.engine.decoder.cuda.products import Product, Products, ProductsBy, torch_product
from treering.engine.decoder.protocol import Decoder
from treering.engine.decoder.weights import DecoderWeights, LayerWeights

MAX_CAPTURED = 1024
"""Most tokens of a captured pass; beyond, launch time is negligible."""

_PassKey = tuple[int, int, int]


class CudaDecoder(Decoder):
    """Forward passes with float32, bfloat16 or float16 weights.

    Attributes:
        spans: the arena; slots of a batch are addresses in it.
        products: the kernel chosen for each matrix product of a captured pass.
    """

    @plain_mode()
    def __init__(self, weights: DecoderWeights, num_slots: int, products: ProductsBy = "measured") -> None:
        """Allocates pages for `num_slots` and a spare page that nothing reads."""
        sizes, device = weights.sizes, weights.device
        self.spans = PagedAllocator(num_slots)
        self.products = Products(weights, products)
        num_pages = int(self.spans.table.max()) + 1
        self._weights = weights
        # Padding tokens of a bucket write to the address after the last one.
        self._nowhere = self.spans.table.size * PAGE_SLOTS
        self._table = torch.zeros(self.spans.table.size + 1, dtype=torch.int32, device=device)
        self._table[-1] = num_pages
        shape = (sizes.num_layers, sizes.num_kv_heads, (num_pages + 1) * PAGE_SLOTS, sizes.head_size)
        self._keys = torch.zeros(shape, dtype=weights.dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        self._buffers: dict[int, Buffers] = {}
        self._captured: dict[_PassKey, tuple[Mailbox, Callable[[], None]]] = {}
        self._mailbox: tuple[int, Mailbox] | None = None

    @property
    def spare_slot(self) -> int:
        """See `Decoder.spare_slot`; padding tokens of a bucket write there too."""
        return self._nowhere

    @plain_mode()
    def run(self, batch: TokenBatch) -> Tensor:
        """See `Decoder.run`."""
        sizes = self._weights.sizes
        tables = plan_tables(batch, sizes.num_heads // sizes.num_kv_heads)
        is_whole = batch.wanted.size == batch.num_tokens
        with on_device(self._weights.device):
            self._follow_spans()
            if is_whole and 0 < batch.num_tokens <= MAX_CAPTURED:
                return self._replay(tables)[: batch.num_tokens]
            return self._start(tables, batch.wanted)

    @plain_mode()
    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """See `Decoder.move`; reads all sources before it writes any target, which is equivalent under its rules."""
        table = self.spans.table.astype(np.int64)
        slots = [
            table[addresses // PAGE_SLOTS] * PAGE_SLOTS + addresses % PAGE_SLOTS for addresses in (sources, targets)
        ]
        with on_device(self._weights.device):
            source, target = self._send(slots)
            for cache in (self._keys, self._values):
                cache.index_copy_(2, target, cache.index_select(2, source))

    def _follow_spans(self) -> None:
        """Copies the changed part of the page table to the device."""
        changed = self.spans.changed()
        if changed is not None:
            (fresh,) = self._send([self.spans.table[slice(*changed)]])
            self._table[slice(*changed)] = fresh

    def _replay(self, tables: PassTables) -> Tensor:
        num_tokens, num_tiles = bucket(tables.tokens.shape[1]), bucket(tables.tiles.shape[0])
        arrays = self._filled(tables, num_tokens, num_tiles)
        key = (num_tokens, num_tiles, tables.rows)
        buffers = self._room(num_tokens)
        logits = buffers.logits[:num_tokens]
        if key not in self._captured:
            mailbox = Mailbox(self._weights.device, sum(padded_bytes(array.nbytes) for array in arrays))
            tokens, tiles = mailbox.send(arrays)
            product = self.products.of(num_tokens)
            work = partial(self._pass, product, buffers, tokens, tiles, None, logits, tables.rows)
            self._captured[key] = mailbox, capture(work, self._weights.device)
        mailbox, replay = self._captured[key]
        mailbox.send(arrays)
        replay()
        return logits

    def _start(self, tables: PassTables, wanted: NDArray[np.int64]) -> Tensor:
        buffers = self._room(tables.tokens.shape[1])
        tokens, tiles, wanted_there = self._send([tables.tokens, tables.tiles, wanted])
        head = self._weights.head
        logits = torch.empty(wanted.size, head.shape[0], dtype=head.dtype, device=head.device)
        self._pass(torch_product, buffers, tokens, tiles, wanted_there, logits, tables.rows)
        return logits

    def _filled(self, tables: PassTables, num_tokens: int, num_tiles: int) -> list[NDArray[np.int64]]:
        """The tables padded to a bucket, with tokens that see nothing and empty tiles."""
        tokens, tiles = np.zeros((TOKEN_COLUMNS, num_tokens), np.int64), np.zeros((num_tiles, TILE_COLUMNS), np.int64)
        tokens[2] = self._nowhere
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
        use = buffers.first(num_tokens, tiles.shape[0])
        torch.index_select(weights.embedding, 0, tokens[0], out=use.x)
        update: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            add_norm(use.x, update, layer.input_norm, use.h, eps)
            product("qkv", use.h, layer.qkv, layer.qkv_bias, use.qkv)
            keys, values = self._keys[index], self._values[index]
            rotation = weights.cos, weights.sin
            rotate_and_write(use.qkv, _norms(layer), rotation, keys, values, tokens, self._table, eps)
            attend(use.qkv, keys, values, tokens, tiles, self._table, use.parts, use.lse, use.attended, rows=rows)
            product("out", use.attended, layer.out, layer.out_bias, use.update)
            add_norm(use.x, use.update, layer.mlp_norm, use.h, eps)
            product("gate_up", use.h, layer.gate_up, layer.gate_up_bias, use.gate_up)
            gate(use.gate_up, use.gated)
            product("down", use.gated, layer.down, layer.down_bias, use.update)
            update = use.update
        add_norm(use.x, update, weights.norm, use.h, eps)
        product("head", use.h if wanted is None else use.h[wanted], weights.head, weights.head_bias, logits)

    def _room(self, num_tokens: int) -> Buffers:
        """Buffers for `num_tokens` rounded up to a power of two, kept at a fixed address."""
        size = 1 << (num_tokens - 1).bit_length()
        if size not in self._buffers:
            self._buffers[size] = Buffers(self._weights, num_tokens=size)
        return self._buffers[size]

    def _send(self, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
        num_bytes = sum(padded_bytes(array.nbytes) for array in arrays)
        if self._mailbox is None or num_bytes > self._mailbox[0]:
            self._mailbox = 2 * num_bytes, Mailbox(self._weights.device, 2 * num_bytes)
        return self._mailbox[1].send(arrays)


def _norms(layer: LayerWeights) -> tuple[Tensor, Tensor] | None:
    return None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
