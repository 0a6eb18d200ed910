"""Decode on CUDA with torch's matrix products and Treering's kernels, captured in one CUDA graph per size.

Passes that want all logits (decoding and verifying drafts) use a graph per bucket of tokens and tiles; passes with
prefill chunks launch their kernels one by one. Tokens of a row share a tile, so their common keys are read once.

    T tokens   W wanted tokens   I tiles   V vocabulary   P parts of the keys   C hidden size   F MLP size
    H query heads   G key heads   D head size
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.arrays import Int64Array
from treering.engine.batch.token_batch import TokenBatch
from treering.engine.decoder.cuda.device import (
    Staging,
    StagingBuffer,
    capture,
    no_grad_mode,
    num_processors,
    on_device,
    padded_bytes,
)
from treering.engine.decoder.cuda.layer_kernels import add_norm, attend, gate, num_parts, rotate_and_write
from treering.engine.decoder.cuda.pages import PAGE_SLOTS, PagedAllocator
from treering.engine.decoder.decoder_weights import DecoderWeights, LayerWeights, Sizes, activation_widths
from treering.engine.decoder.plain_decoder import Decoder

ROWS_OF_TILES = (16, 64)
"""Queries per tile, tokens times heads: the minimum of the matrix units, and the most that fits with the keys."""

TOKEN_COLUMNS = 6
"""token, position, address, num_own, tree_offset, tree_bits"""

TILE_COLUMNS = 6
"""first token, number of tokens, prefix_start, num_prefix, own_start, num_read"""


class PassTables(NamedTuple):
    """Inputs of a pass, except weights."""

    tokens: Int64Array  # [6, T], see TOKEN_COLUMNS; a tree begins tree_offset addresses after the own span's start
    tiles: Int64Array  # [I, 6], see TILE_COLUMNS; some token sees the first num_read addresses of the own span
    rows: int  # queries of a tile, of ROWS_OF_TILES


def make_tables(batch: TokenBatch, num_groups: int) -> PassTables:
    """Return the tables of a pass with `num_groups` query heads per key head, at most 64.

    Example: with 4 heads per key head, rows of 3 tokens and 1 token are two tiles of 16 queries. A chunk of 100 tokens
    does not fit a tile of 16 queries, which holds 4, so all tiles get 64 queries and the chunk takes 7 tiles.
    """
    starts, lengths = _runs(batch)
    rows = next((rows for rows in ROWS_OF_TILES if rows // num_groups >= lengths.max(initial=1)), ROWS_OF_TILES[-1])
    most = rows // num_groups
    num_tiles = -(-lengths // most)
    tile_of_row = np.arange(num_tiles.sum()) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    first = np.repeat(starts, num_tiles) + tile_of_row * most
    offset = np.where(batch.tree_bits != 0, batch.tree_start - batch.own_start, 0)
    num_read = np.maximum(batch.num_own, np.where(batch.tree_bits != 0, offset + _length(batch.tree_bits), 0))
    tiles = [
        first,
        np.minimum(most, np.repeat(starts + lengths, num_tiles) - first),
        batch.prefix_start[first],
        batch.num_prefix[first],
        batch.own_start[first],
        np.maximum.reduceat(num_read, first) if first.size else first,
    ]
    columns = [batch.tokens, batch.positions, batch.slots, batch.num_own, offset, batch.tree_bits]
    return PassTables(np.stack(columns), np.stack(tiles, 1), rows)


def _runs(batch: TokenBatch) -> tuple[Int64Array, Int64Array]:
    """Return the first tokens and the lengths of the runs of tokens with the same spans."""
    spans = np.stack([batch.prefix_start, batch.num_prefix, batch.own_start])
    is_start = np.ones(batch.num_tokens, bool)
    is_start[1:] = (spans[:, 1:] != spans[:, :-1]).any(0)
    starts = np.flatnonzero(is_start)
    return starts, np.diff(starts, append=batch.num_tokens)


def _length(bits: Int64Array) -> Int64Array:
    """Return the index of the highest set bit, from 1; rounding may make it one too high for long runs of set bits."""
    return np.frexp(bits.view(np.uint64).astype(np.float64))[1].astype(np.int64)


def bucket(count: int) -> int:
    """Round `count` >= 1 up to the size of a captured pass: powers of two up to 64, then multiples of 64.

    Example: 1, 2, 3, 64, 65 and 130 become 1, 2, 4, 64, 128 and 192.
    """
    return 1 << (count - 1).bit_length() if count <= 64 else -(-count // 64) * 64


class Views(NamedTuple):
    """Buffers of one pass, in the model's dtype unless noted."""

    x: Tensor  # [T, C] residual stream
    h: Tensor  # [T, C] its norm
    update: Tensor  # [T, C] to be added to x next
    qkv: Tensor  # [T, (H + 2 G) D]
    attended: Tensor  # [T, H D]
    gate_up: Tensor  # [T, 2 F]
    gated: Tensor  # [T, F]
    parts: Tensor  # float32 [P, T, H, D]
    lse: Tensor  # float32 [P, T, H]


class Buffers:
    """Memory that all passes of up to `num_tokens` tokens share."""

    def __init__(self, weights: DecoderWeights, *, num_tokens: int) -> None:
        """Allocate everything but the logits, which only some passes write here."""
        sizes, device = weights.sizes, weights.device
        self._weights = weights
        self._num_tokens = num_tokens
        self._tensors = [
            torch.zeros(num_tokens, width, dtype=weights.dtype, device=device)
            for width in activation_widths(sizes).values()
        ]
        self._num_lines = _most_lines(sizes, num_tokens, num_processors(device))
        self._parts = torch.zeros(self._num_lines, sizes.num_heads, sizes.head_size, device=device)
        self._lse = torch.zeros(self._num_lines, sizes.num_heads, device=device)
        self._logits: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """Logits of all tokens, [T, V]; allocated at first use."""
        if self._logits is None:
            head = self._weights.head
            self._logits = torch.zeros(self._num_tokens, head.shape[0], dtype=head.dtype, device=head.device)
        return self._logits

    def first(self, num_tokens: int, num_tiles: int) -> Views:
        """Return views for a pass of `num_tokens` tokens in `num_tiles` tiles."""
        weights = self._weights
        shape = num_parts(num_tiles, weights.sizes.num_kv_heads, num_processors(weights.device)), num_tokens
        num_lines = shape[0] * num_tokens
        assert num_tokens <= self._num_tokens
        assert num_lines <= self._num_lines
        parts = self._parts[:num_lines].view(*shape, *self._parts.shape[1:])
        lse = self._lse[:num_lines].view(*shape, -1)
        return Views._make([*(tensor[:num_tokens] for tensor in self._tensors), parts, lse])


def _most_lines(sizes: Sizes, num_tokens: int, num_processors: int) -> int:
    """Return the most tokens times parts of any pass with more than `num_tokens` / 2 and up to `num_tokens` tokens."""
    # Fewer tokens mean fewer tiles and therefore more parts.
    fewest_tiles = num_tokens // 2 * (sizes.num_heads // sizes.num_kv_heads) // ROWS_OF_TILES[-1]
    return num_tokens * num_parts(max(1, fewest_tiles), sizes.num_kv_heads, num_processors)


MAX_CAPTURED = 1024
"""Most tokens of a captured pass; above that, launch time is negligible."""

_PassKey = tuple[int, int, int]


class CudaDecoder(Decoder):
    """Decoder for float32, bfloat16 or float16 weights on CUDA.

    Attributes:
        allocator: the arena; a batch's slots are addresses in it.
    """

    @no_grad_mode()
    def __init__(self, weights: DecoderWeights, num_slots: int) -> None:
        """Allocate pages for `num_slots` and a spare page that nothing reads."""
        sizes, device = weights.sizes, weights.device
        self.allocator = PagedAllocator(num_slots)
        num_pages = int(self.allocator.table.max()) + 1
        self._weights = weights
        # Padding tokens of a bucket write to the address after the last one.
        self._spare_address = self.allocator.table.size * PAGE_SLOTS
        self._table = torch.zeros(self.allocator.table.size + 1, dtype=torch.int32, device=device)
        self._table[-1] = num_pages
        shape = (sizes.num_layers, sizes.num_kv_heads, (num_pages + 1) * PAGE_SLOTS, sizes.head_size)
        self._keys = torch.zeros(shape, dtype=weights.dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        self._buffers: dict[int, Buffers] = {}
        self._captured: dict[_PassKey, tuple[StagingBuffer, Callable[[], None]]] = {}
        self._staging = Staging(device)

    @property
    def spare_slot(self) -> int:
        """A slot that nothing reads; padding tokens of a bucket write there too."""
        return self._spare_address

    @no_grad_mode()
    def run(self, batch: TokenBatch) -> Tensor:
        """Write the batch's keys and values and return logits [W, V], valid until the next run."""
        sizes = self._weights.sizes
        tables = make_tables(batch, sizes.num_heads // sizes.num_kv_heads)
        is_whole = batch.wanted.size == batch.num_tokens
        with on_device(self._weights.device):
            self._sync_page_table()
            if is_whole and 0 < batch.num_tokens <= MAX_CAPTURED:
                return self._replay(tables)[: batch.num_tokens]
            return self._launch(tables, batch.wanted)

    @no_grad_mode()
    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copy keys and values between slots; read all sources first, which the rules of `Decoder.move` allow."""
        table = self.allocator.table.astype(np.int64)
        slots = [
            table[addresses // PAGE_SLOTS] * PAGE_SLOTS + addresses % PAGE_SLOTS for addresses in (sources, targets)
        ]
        with on_device(self._weights.device):
            source, target = self._staging.send(slots)
            for cache in (self._keys, self._values):
                cache.index_copy_(2, target, cache.index_select(2, source))

    def _sync_page_table(self) -> None:
        changed = self.allocator.pop_changed()
        if changed is not None:
            (fresh,) = self._staging.send([self.allocator.table[slice(*changed)]])
            self._table[slice(*changed)] = fresh

    def _replay(self, tables: PassTables) -> Tensor:
        num_tokens, num_tiles = bucket(tables.tokens.shape[1]), bucket(tables.tiles.shape[0])
        arrays = self._padded(tables, num_tokens, num_tiles)
        key = (num_tokens, num_tiles, tables.rows)
        buffers = self._buffers_for(num_tokens)
        logits = buffers.logits[:num_tokens]
        if key not in self._captured:
            staging = StagingBuffer(self._weights.device, sum(padded_bytes(array.nbytes) for array in arrays))
            tokens, tiles = staging.send(arrays)
            work = partial(self._pass, buffers, tokens, tiles, None, logits, tables.rows)
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
        self._pass(buffers, tokens, tiles, wanted_on_device, logits, tables.rows)
        return logits

    def _padded(self, tables: PassTables, num_tokens: int, num_tiles: int) -> list[NDArray[np.int64]]:
        """Return the tables padded to a bucket, with tokens that see nothing and empty tiles."""
        tokens, tiles = np.zeros((TOKEN_COLUMNS, num_tokens), np.int64), np.zeros((num_tiles, TILE_COLUMNS), np.int64)
        tokens[2] = self._spare_address
        tokens[:, : tables.tokens.shape[1]] = tables.tokens
        tiles[: tables.tiles.shape[0]] = tables.tiles
        return [tokens, tiles]

    def _pass(
        self,
        buffers: Buffers,
        tokens: Tensor,
        tiles: Tensor,
        wanted: Tensor | None,
        logits: Tensor,
        rows: int,
    ) -> None:
        """Launch all kernels of a pass and write the logits of the wanted tokens (None: all)."""
        weights, eps = self._weights, self._weights.sizes.eps
        num_tokens = tokens.shape[1]
        views = buffers.first(num_tokens, tiles.shape[0])
        torch.index_select(weights.embedding, 0, tokens[0], out=views.x)
        update: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            add_norm(views.x, update, layer.input_norm, views.h, eps)
            _product(views.h, layer.qkv, layer.qkv_bias, views.qkv)
            keys, values = self._keys[index], self._values[index]
            rotation = weights.cos, weights.sin
            rotate_and_write(views.qkv, _norms(layer), rotation, keys, values, tokens, self._table, eps)
            attend(
                views.qkv, keys, values, tokens, tiles, self._table, views.parts, views.lse, views.attended, rows=rows
            )
            _product(views.attended, layer.out, layer.out_bias, views.update)
            add_norm(views.x, views.update, layer.mlp_norm, views.h, eps)
            _product(views.h, layer.gate_up, layer.gate_up_bias, views.gate_up)
            gate(views.gate_up, views.gated)
            _product(views.gated, layer.down, layer.down_bias, views.update)
            update = views.update
        add_norm(views.x, update, weights.norm, views.h, eps)
        _product(views.h if wanted is None else views.h[wanted], weights.head, weights.head_bias, logits)

    def _buffers_for(self, num_tokens: int) -> Buffers:
        """Return buffers for `num_tokens` rounded up to a power of two, at a fixed address."""
        size = 1 << (num_tokens - 1).bit_length()
        if size not in self._buffers:
            self._buffers[size] = Buffers(self._weights, num_tokens=size)
        return self._buffers[size]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write x [T, K] times the transposed weight [N, K], plus the bias, to out [T, N]."""
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


def _norms(layer: LayerWeights) -> tuple[Tensor, Tensor] | None:
    return None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)


def unsupported_reason(weights: DecoderWeights) -> str | None:
    """Return why the kernels do not support these weights, as the end of a sentence; None if they do.

    Example: float64 weights give "needs float32, bfloat16 or float16, and the model is torch.float64".
    """
    from treering.attention.triton_kernels import INTERPRETED

    sizes, dtype = weights.sizes, weights.dtype
    if weights.device.type != "cuda" and not INTERPRETED:
        return f"needs a CUDA device, and the model is on {weights.device}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"needs float32, bfloat16 or float16, and the model is {dtype}"
    if sizes.head_size > 128 or sizes.head_size % 2:
        return f"supports even head sizes up to 128, and the model has {sizes.head_size}"
    num_groups = sizes.num_heads // sizes.num_kv_heads
    if num_groups > ROWS_OF_TILES[-1]:
        return f"supports up to {ROWS_OF_TILES[-1]} query heads per key head, and the model has {num_groups}"
    return None
