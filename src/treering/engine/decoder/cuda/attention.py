"""Attention over the key-value arena: one program per tile of tokens, key head and part of the keys.

A tile holds all query heads of one key head, for several tokens of one row. Partial results are combined by
`treering.engine.decoder.cuda.attention`.

    T tokens   I tiles   H query heads   G key heads   D head size   S slots   P parts   W width of a token's line
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from treering.attention.triton.ops import INTERPRETED

LOG2_E = 1.4426950408889634


MAX_PARTS = 32


_PROGRAMS = 4
"""Programs per multiprocessor, enough to hide memory latency."""


@triton.jit
@no_type_check
def factor(tile, WIDE: tl.constexpr):
    """An operand of a matrix product, in float32 for the interpreter, which does not support bfloat16."""
    if WIDE:
        return tile.to(tl.float32)
    return tile


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
    num_tokens,
    num_slots,
    GROUPS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    FACTOR: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Outputs [P, T, H, D] and log2-sum-exp2 [P, T, H] over each part of the keys; grid (I, G, P).

    With a single part (WHOLE) writes out [T, H, D] instead; tokens outside all tiles are not written.
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
    # What a row sees of its own span and tree; key indices count the prefix first.
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
    for at in tl.range(begin, end, KEY_TILE):
        key_number = at + tl.arange(0, KEY_TILE)
        is_key = key_number < end
        own = key_number - num_prefix
        # Keys of the prefix come first.
        slot = tl.where(own < 0, prefix_start + key_number, own_start + own)
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
    place = (part * num_tokens + token) * (GROUPS * KEY_HEADS) + query_head
    has_seen = total > 0.0
    out = out / tl.where(has_seen, total, 1.0)[:, None]
    lines = (place * HEAD_SIZE)[:, None] + column[None, :]
    if WHOLE:
        tl.store(out_ptr + lines, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
        return
    tl.store(parts_ptr + lines, out, mask=is_row[:, None] & is_column[None, :])
    lse = tl.where(has_seen, peak + tl.log2(tl.where(has_seen, total, 1.0)), float("-inf"))
    tl.store(lse_ptr + place, lse, mask=is_row)


def attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    tokens: Tensor,
    tiles: Tensor,
    parts: Tensor,
    lse: Tensor,
    out: Tensor,
    *,
    rows: int,
) -> None:
    """Attention of every token over its visible keys.

    Args:
        qkv: [T, (H + 2 G) D], queries rotated.
        keys: [G, S, D] of the layer.
        values: the same.
        tokens: int64 [6, T], of `PassTables`.
        tiles: int64 [I, 6], of `PassTables`; a tile of 0 tokens does nothing.
        parts: float32 [P, T, H, D], overwritten unless P, a power of two, is 1.
        lse: float32 [P, T, H], the same.
        out: [T, H D], written. Tokens outside all tiles get zeros, or with one part stay unchanged.
        rows: queries of a tile.
    """
    num_key_heads, num_slots, head_size = keys.shape
    num_parts, num_tokens, num_heads, _ = parts.shape
    padded = padded_size(head_size)
    attend_kernel[(tiles.shape[0], num_key_heads, num_parts)](
        qkv, keys, values, parts, lse, out, tokens, tiles, num_tokens, num_slots,
        GROUPS=num_heads // num_key_heads, KEY_HEADS=num_key_heads, HEAD_SIZE=head_size, PADDED=padded, ROWS=rows,
        KEY_TILE=32 if keys.dtype == torch.float32 else 64, FACTOR=head_size**-0.5 * LOG2_E,
        WHOLE=num_parts == 1, WIDE=INTERPRETED, num_warps=4, num_stages=num_stages(rows, keys.dtype),
    )  # fmt: skip
    if num_parts > 1:
        add_parts(parts, lse, tokens, out, head_size=head_size)


def num_stages(rows: int, dtype: torch.dtype) -> int:
    """Pipeline stages of the loop over keys that give two buffers: one is read while the next is filled.

    Example: 2 for 64 rows in bfloat16, whose products read keys from shared memory. Others copy keys to registers
    first, so 2 stages would give them a single buffer.
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
    """Combines the parts' outputs into out [T, H, D]; zeros for padding tokens. Grid (T, H)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, column = tl.arange(0, PARTS), tl.arange(0, PADDED)
    num_seen = tl.load(tokens_ptr + 3 * num_tokens + token) | tl.load(tokens_ptr + 5 * num_tokens + token)
    # Broadcast to all parts: some versions of the interpreter ignore a scalar mask.
    is_token = num_seen + 0 * part != 0
    place = (part * num_tokens + token) * HEADS + head
    lse = tl.load(lse_ptr + place, mask=is_token, other=0.0)
    weight = tl.exp2(lse - tl.max(lse, 0))
    seen = ((lse > float("-inf")) & is_token)[:, None] & (column < HEAD_SIZE)[None, :]
    out = tl.load(parts_ptr + (place * HEAD_SIZE)[:, None] + column[None, :], mask=seen, other=0.0)
    out = tl.sum(out * weight[:, None], 0) / tl.sum(weight, 0)
    line = out_ptr + (token * HEADS + head) * HEAD_SIZE + column
    tl.store(line, out.to(out_ptr.dtype.element_ty), mask=column < HEAD_SIZE)


def add_parts(parts: Tensor, lse: Tensor, tokens: Tensor, out: Tensor, *, head_size: int) -> None:
    """Combines the output of `attend_kernel` for two or more parts into out [T, H D].

    Example: outputs 1.0 and 3.0 of two parts with equal lse give 2.0.
    """
    num_parts, num_tokens, num_heads, _ = parts.shape
    add_parts_kernel[(num_tokens, num_heads)](
        parts, lse, out, tokens, num_tokens,
        HEADS=num_heads, HEAD_SIZE=head_size, PADDED=padded_size(head_size), PARTS=num_parts, num_warps=1,
    )  # fmt: skip


def num_parts(num_tiles: int, num_key_heads: int, num_processors: int) -> int:
    """Number of parts of the keys: a power of two that gives every multiprocessor enough programs.

    Example: with 132 multiprocessors and 8 key heads, one tile gets 32 parts, 16 tiles get 4 and 64 tiles one.
    """
    wanted = max(1, min(MAX_PARTS, _PROGRAMS * num_processors // (num_tiles * num_key_heads)))
    return 1 << (wanted.bit_length() - 1)


def padded_size(head_size: int) -> int:
    """Columns of a head in a tile: a power of two, at least 16."""
    return max(16, 1 << (head_size - 1).bit_length())
