"""Launch the kernels between a layer's matrix products: norms, rotation, key and value writes, attention, the gate.

They round where the model's own modules round, except that the rotation rounds once. Attention runs one program per
tile of tokens, key head and part of the keys; a tile has all query heads of one key head, for several tokens of a row.

    T tokens   C hidden size   H query heads   G key heads   D head size   F MLP size   S slots   I tiles   P parts
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from treering.attention.triton_kernels import INTERPRETED
from treering.attention.triton_tables import padded_size
from treering.engine.decoder.cuda.pages import PAGE_SLOTS

_GATE_TILE = 1024


@triton.jit
@no_type_check
def _times(left, right):
    """Return a product rounded once to the operands' dtype; the interpreter cannot multiply bfloat16."""
    return (left.to(tl.float32) * right.to(tl.float32)).to(left.dtype)


@triton.jit
@no_type_check
def norm_kernel(
    x_ptr, update_ptr, weight_ptr, out_ptr, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr
):
    """Add an update to a token's x, if there is one, and write its norm; grid (T,)."""
    column = tl.arange(0, PADDED)
    is_column = column < SIZE
    line = tl.program_id(0).to(tl.int64) * SIZE + column
    x = tl.load(x_ptr + line, mask=is_column, other=0.0)
    if ADD:
        update = tl.load(update_ptr + line, mask=is_column, other=0.0)
        x = (x.to(tl.float32) + update.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + line, x, mask=is_column)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + column, mask=is_column, other=0.0)
    tl.store(out_ptr + line, _times((wide * scale).to(x.dtype), weight), mask=is_column)


@triton.jit(do_not_specialize=["num_tokens"])
@no_type_check
def rotate_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    tokens_ptr,
    table_ptr,
    num_tokens,
    num_slots,
    eps,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Normalise and rotate queries in place and keys into their page, and copy values; grid (T, H + 2 G).

    A head is held as two halves of `PADDED` columns.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = HEAD_SIZE // 2
    column = tl.arange(0, PADDED)
    is_column = column < HALF
    line = qkv_ptr + (token * (HEADS + 2 * KEY_HEADS) + head) * HEAD_SIZE + column
    first = tl.load(line, mask=is_column, other=0.0)
    second = tl.load(line + HALF, mask=is_column, other=0.0)
    if head < HEADS + KEY_HEADS:
        if HAS_NORM:
            wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
            squares = tl.sum(wide_first * wide_first + wide_second * wide_second, 0)
            scale = 1.0 / tl.sqrt(squares / HEAD_SIZE + eps)
            weight_ptr = q_norm_ptr + column
            if head >= HEADS:
                weight_ptr = k_norm_ptr + column
            weight_first = tl.load(weight_ptr, mask=is_column, other=0.0)
            weight_second = tl.load(weight_ptr + HALF, mask=is_column, other=0.0)
            first = _times((wide_first * scale).to(first.dtype), weight_first)
            second = _times((wide_second * scale).to(second.dtype), weight_second)
        angle = tl.load(tokens_ptr + num_tokens + token) * HEAD_SIZE + column
        cos_first = tl.load(cos_ptr + angle, mask=is_column, other=0.0).to(tl.float32)
        cos_second = tl.load(cos_ptr + angle + HALF, mask=is_column, other=0.0).to(tl.float32)
        sin_first = tl.load(sin_ptr + angle, mask=is_column, other=0.0).to(tl.float32)
        sin_second = tl.load(sin_ptr + angle + HALF, mask=is_column, other=0.0).to(tl.float32)
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        first = (wide_first * cos_first - wide_second * sin_first).to(first.dtype)
        second = (wide_second * cos_second + wide_first * sin_second).to(second.dtype)
    if head < HEADS:
        tl.store(line, first, mask=is_column)
        tl.store(line + HALF, second, mask=is_column)
    else:
        address = tl.load(tokens_ptr + 2 * num_tokens + token)
        slot = tl.load(table_ptr + address // PAGE).to(tl.int64) * PAGE + address % PAGE
        is_key = head < HEADS + KEY_HEADS
        key_head = tl.where(is_key, head - HEADS, head - HEADS - KEY_HEADS).to(tl.int64)
        cell = (key_head * num_slots + slot) * HEAD_SIZE + column
        # Broadcast to all columns: some versions of the interpreter ignore a scalar mask.
        of_keys = head + 0 * column < HEADS + KEY_HEADS
        tl.store(keys_ptr + cell, first, mask=is_column & of_keys)
        tl.store(keys_ptr + cell + HALF, second, mask=is_column & of_keys)
        tl.store(values_ptr + cell, first, mask=is_column & ~of_keys)
        tl.store(values_ptr + cell + HALF, second, mask=is_column & ~of_keys)


@triton.jit
@no_type_check
def gate_kernel(gate_up_ptr, out_ptr, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Write silu(gate) * up of a token; grid (T, tiles of F)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < SIZE
    gate = tl.load(gate_up_ptr + token * 2 * SIZE + column, mask=is_column, other=0.0)
    up = tl.load(gate_up_ptr + token * 2 * SIZE + SIZE + column, mask=is_column, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + token * SIZE + column, _times(silu, up), mask=is_column)


def add_norm(x: Tensor, update: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    """Add `update` to x [T, C] in place, and write the root-mean-square norm of the sum to `out`."""
    size = x.shape[1]
    norm_kernel[(x.shape[0],)](
        x, x if update is None else update, weight, out, eps,
        SIZE=size, PADDED=_power_of_two(size), ADD=update is not None, num_warps=8 if size > 2048 else 4,
    )  # fmt: skip


def rotate_and_write(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    rotation: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    tokens: Tensor,
    table: Tensor,
    eps: float,
) -> None:
    """Normalise and rotate the queries of qkv [T, (H + 2 G) D] in place, and write keys and values to their slots.

    Args:
        qkv: output of the layer's projection.
        norms: [D] for queries and for keys; None for families without them.
        rotation: cosines and sines [positions, D].
        keys: [G, S, D], the layer's arena.
        values: [G, S, D].
        tokens: int64 [6, T], from `PassTables`.
        table: int32, the page of each 16 addresses.
        eps: epsilon of the norms.
    """
    num_key_heads, num_slots, head_size = keys.shape
    num_units = qkv.shape[1] // head_size
    rotate_kernel[(qkv.shape[0], num_units)](
        qkv, *(norms or (qkv, qkv)), *rotation, keys, values, tokens, table, qkv.shape[0], num_slots, eps,
        HEADS=num_units - 2 * num_key_heads, KEY_HEADS=num_key_heads, HEAD_SIZE=head_size,
        PADDED=_power_of_two(head_size // 2), HAS_NORM=norms is not None, PAGE=PAGE_SLOTS, num_warps=1,
    )  # fmt: skip


def gate(gate_up: Tensor, out: Tensor) -> None:
    """Write silu(gate) * up to `out` [T, F], from gate_up [T, 2 F]."""
    size = out.shape[1]
    gate_kernel[(out.shape[0], -(-size // _GATE_TILE))](gate_up, out, SIZE=size, TILE=_GATE_TILE, num_warps=4)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


LOG2_E = 1.4426950408889634


MAX_PARTS = 32


_PROGRAMS = 4
"""Programs per multiprocessor, enough to hide memory latency."""


@triton.jit
@no_type_check
def factor(tile, WIDE: tl.constexpr):
    """Return an operand of a matrix product, as float32 in the interpreter, which does not support bfloat16."""
    if WIDE:
        return tile.to(tl.float32)
    return tile


@triton.jit
@no_type_check
def _addresses(at, prefix_start, num_prefix, own_start, KEY_TILE: tl.constexpr):
    """Return the addresses of the keys from index `at` on; prefix keys come first."""
    key_number = at + tl.arange(0, KEY_TILE)
    return tl.where(key_number < num_prefix, prefix_start + key_number, own_start + key_number - num_prefix)


@triton.jit
@no_type_check
def _pages(table_ptr, addresses, at, end, KEY_TILE: tl.constexpr, PAGE: tl.constexpr):
    """Return the pages of the keys' addresses from index `at` on; 0 from `end` on."""
    return tl.load(table_ptr + addresses // PAGE, mask=at + tl.arange(0, KEY_TILE) < end, other=0)


@triton.jit
@no_type_check
def _slots(pages, addresses, PAGE: tl.constexpr):
    return pages.to(tl.int64) * PAGE + addresses % PAGE


@triton.jit(do_not_specialize=["num_tokens"])
@no_type_check
def attend_kernel(
    qkv_ptr,
    keys_ptr,
    values_ptr,
    parts_ptr,
    lse_ptr,
    out_ptr,
    tokens_ptr,
    tiles_ptr,
    table_ptr,
    num_tokens,
    num_slots,
    GROUPS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    PAGE: tl.constexpr,
    FACTOR: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute outputs [P, T, H, D] and log2-sum-exp2 [P, T, H] over each part of the keys; grid (I, G, P).

    With a single part (WHOLE), writes out [T, H, D] instead. Tokens outside all tiles are not written.
    """
    tile = tiles_ptr + tl.program_id(0) * 6
    head = tl.program_id(1)
    part = tl.program_id(2)
    first, count = tl.load(tile), tl.load(tile + 1)
    prefix_start, num_prefix = tl.load(tile + 2), tl.load(tile + 3)
    own_start, num_read = tl.load(tile + 4), tl.load(tile + 5)
    row = tl.arange(0, ROWS)
    is_row = row // GROUPS < count
    token = first + row // GROUPS
    query_head = head * GROUPS + row % GROUPS
    # The part of its own span and tree that a row sees; key indices count the prefix first.
    num_own = tl.load(tokens_ptr + 3 * num_tokens + token, mask=is_row, other=0)
    tree_offset = tl.load(tokens_ptr + 4 * num_tokens + token, mask=is_row, other=0)
    tree_bits = tl.load(tokens_ptr + 5 * num_tokens + token, mask=is_row, other=0)
    column = tl.arange(0, PADDED)
    is_column = column < HEAD_SIZE
    width = (GROUPS + 2) * KEY_HEADS * HEAD_SIZE
    query = tl.load(
        qkv_ptr + (token * width + query_head * HEAD_SIZE)[:, None] + column[None, :],
        mask=is_row[:, None] & is_column[None, :],
        other=0.0,
    )
    base = head.to(tl.int64) * num_slots * HEAD_SIZE
    total_keys = num_prefix + num_read
    per_part = tl.cdiv(tl.cdiv(total_keys, KEY_TILE), tl.num_programs(2))
    begin = part * per_part * KEY_TILE
    end = tl.minimum(begin + per_part * KEY_TILE, total_keys)
    out = tl.zeros([ROWS, PADDED], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    # Page lookups run two tiles ahead, so that loads of the next tile's keys and values wait for no other load.
    address = _addresses(begin, prefix_start, num_prefix, own_start, KEY_TILE)
    slot = _slots(_pages(table_ptr, address, begin, end, KEY_TILE, PAGE), address, PAGE)
    address = _addresses(begin + KEY_TILE, prefix_start, num_prefix, own_start, KEY_TILE)
    page = _pages(table_ptr, address, begin + KEY_TILE, end, KEY_TILE, PAGE)
    for at in tl.range(begin, end, KEY_TILE):
        key_number = at + tl.arange(0, KEY_TILE)
        is_key = key_number < end
        own = key_number - num_prefix
        lines = base + (slot * HEAD_SIZE)[:, None] + column[None, :]
        in_cache = is_key[:, None] & is_column[None, :]
        key = tl.load(keys_ptr + lines, mask=in_cache, other=0.0)
        value = tl.load(values_ptr + lines, mask=in_cache, other=0.0)
        keys_by_column = factor(tl.trans(key), WIDE)
        scores = tl.dot(factor(query, WIDE), keys_by_column, input_precision="tf32x3", out_dtype=tl.float32) * FACTOR
        bit = own[None, :] - tree_offset[:, None]
        in_tree = (bit >= 0) & (bit < 64) & (((tree_bits[:, None] >> tl.minimum(tl.maximum(bit, 0), 63)) & 1) != 0)
        visible = is_row[:, None] & is_key[None, :] & ((own[None, :] < num_own[:, None]) | in_tree)
        scores = tl.where(visible, scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen no key yet has a peak of -inf, and -inf - -inf is NaN.
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None]
        rounded = factor(weights.to(value.dtype), WIDE)
        out = tl.dot(rounded, factor(value, WIDE), out, input_precision="tf32x3", out_dtype=tl.float32)
        peak = highest
        slot = _slots(page, _addresses(at + KEY_TILE, prefix_start, num_prefix, own_start, KEY_TILE), PAGE)
        address = _addresses(at + 2 * KEY_TILE, prefix_start, num_prefix, own_start, KEY_TILE)
        page = _pages(table_ptr, address, at + 2 * KEY_TILE, end, KEY_TILE, PAGE)
    cell = (part * num_tokens + token) * (GROUPS * KEY_HEADS) + query_head
    has_seen = total > 0.0
    out = out / tl.where(has_seen, total, 1.0)[:, None]
    lines = (cell * HEAD_SIZE)[:, None] + column[None, :]
    if WHOLE:
        tl.store(out_ptr + lines, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
        return
    tl.store(parts_ptr + lines, out, mask=is_row[:, None] & is_column[None, :])
    lse = tl.where(has_seen, peak + tl.log2(tl.where(has_seen, total, 1.0)), float("-inf"))
    tl.store(lse_ptr + cell, lse, mask=is_row)


def attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    tokens: Tensor,
    tiles: Tensor,
    table: Tensor,
    parts: Tensor,
    lse: Tensor,
    out: Tensor,
    *,
    rows: int,
) -> None:
    """Attend with every token's queries over its visible keys.

    Args:
        qkv: [T, (H + 2 G) D], queries rotated.
        keys: [G, S, D], the layer's arena.
        values: [G, S, D].
        tokens: int64 [6, T], from `PassTables`.
        tiles: int64 [I, 6], from `PassTables`; a tile of 0 tokens does nothing.
        table: int32, the page of each 16 addresses.
        parts: float32 [P, T, H, D], overwritten unless P, a power of two, is 1.
        lse: float32 [P, T, H], overwritten like `parts`.
        out: [T, H D], written. Tokens outside all tiles get zeros, but stay unchanged if P is 1.
        rows: queries per tile.
    """
    num_key_heads, num_slots, head_size = keys.shape
    num_parts, num_tokens, num_heads, _ = parts.shape
    padded = padded_size(head_size)
    attend_kernel[(tiles.shape[0], num_key_heads, num_parts)](
        qkv, keys, values, parts, lse, out, tokens, tiles, table, num_tokens, num_slots,
        GROUPS=num_heads // num_key_heads, KEY_HEADS=num_key_heads, HEAD_SIZE=head_size, PADDED=padded, ROWS=rows,
        KEY_TILE=32 if keys.dtype == torch.float32 else 64, PAGE=PAGE_SLOTS, FACTOR=head_size**-0.5 * LOG2_E,
        WHOLE=num_parts == 1, WIDE=INTERPRETED, num_warps=4, num_stages=num_stages(rows, keys.dtype),
    )  # fmt: skip
    if num_parts > 1:
        add_parts(parts, lse, tokens, out, head_size=head_size)


def num_stages(rows: int, dtype: torch.dtype) -> int:
    """Return the pipeline stages of the key loop that give two buffers: one is read while the next is filled.

    Example: 2 for 64 rows in bfloat16, whose products read keys from shared memory. Other products first copy keys to
    registers, so 2 stages would give them a single buffer.
    """
    return 2 if rows == 64 and dtype != torch.float32 else 3


@triton.jit(do_not_specialize=["num_tokens"])
@no_type_check
def add_parts_kernel(
    parts_ptr,
    lse_ptr,
    out_ptr,
    tokens_ptr,
    num_tokens,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Combine the parts' outputs into out [T, H, D]; padding tokens get zeros. Grid (T, H)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, column = tl.arange(0, PARTS), tl.arange(0, PADDED)
    num_seen = tl.load(tokens_ptr + 3 * num_tokens + token) | tl.load(tokens_ptr + 5 * num_tokens + token)
    # Broadcast to all parts: some versions of the interpreter ignore a scalar mask.
    is_token = num_seen + 0 * part != 0
    cell = (part * num_tokens + token) * HEADS + head
    lse = tl.load(lse_ptr + cell, mask=is_token, other=0.0)
    weight = tl.exp2(lse - tl.max(lse, 0))
    seen = ((lse > float("-inf")) & is_token)[:, None] & (column < HEAD_SIZE)[None, :]
    out = tl.load(parts_ptr + (cell * HEAD_SIZE)[:, None] + column[None, :], mask=seen, other=0.0)
    out = tl.sum(out * weight[:, None], 0) / tl.sum(weight, 0)
    line = out_ptr + (token * HEADS + head) * HEAD_SIZE + column
    tl.store(line, out.to(out_ptr.dtype.element_ty), mask=column < HEAD_SIZE)


def add_parts(parts: Tensor, lse: Tensor, tokens: Tensor, out: Tensor, *, head_size: int) -> None:
    """Combine the output of `attend_kernel` for two or more parts into out [T, H D].

    Example: outputs 1.0 and 3.0 of two parts with equal lse give 2.0.
    """
    num_parts, num_tokens, num_heads, _ = parts.shape
    add_parts_kernel[(num_tokens, num_heads)](
        parts, lse, out, tokens, num_tokens,
        HEADS=num_heads, HEAD_SIZE=head_size, PADDED=padded_size(head_size), PARTS=num_parts, num_warps=1,
    )  # fmt: skip


def num_parts(num_tiles: int, num_key_heads: int, num_processors: int) -> int:
    """Return the number of parts of the keys: a power of two that gives every multiprocessor enough programs.

    Example: with 132 multiprocessors and 8 key heads, one tile gets 32 parts, 16 tiles get 4 and 64 tiles one.
    """
    wanted = max(1, min(MAX_PARTS, _PROGRAMS * num_processors // (num_tiles * num_key_heads)))
    return 1 << (wanted.bit_length() - 1)
