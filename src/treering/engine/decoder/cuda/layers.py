"""Kernels between a layer's matrix products: norms, rotation with writing of keys and values, and the MLP's gate.

One program per token. They round where the model's own modules round, except that the rotation rounds once.

    T tokens   C hidden size   H query heads   G key heads   D head size   F MLP size   S slots
"""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

_GATE_TILE = 1024


@triton.jit
@no_type_check
def _times(left, right):
    """A product rounded once to the operands' dtype; the interpreter does not support it in bfloat16."""
    return (left.to(tl.float32) * right.to(tl.float32)).to(left.dtype)


@triton.jit
@no_type_check
def norm_kernel(
    x_ptr, update_ptr, weight_ptr, out_ptr, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr
):
    """Adds an update to a token's x, if there is one, and writes its norm; grid (T,)."""
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
    num_tokens,
    num_slots,
    eps,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Norms and rotates queries in place and keys into their slot, and copies values; grid (T, H + 2 G).

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
        slot = tl.load(tokens_ptr + 2 * num_tokens + token)
        is_key = head < HEADS + KEY_HEADS
        key_head = tl.where(is_key, head - HEADS, head - HEADS - KEY_HEADS).to(tl.int64)
        place = (key_head * num_slots + slot) * HEAD_SIZE + column
        # Broadcast to all columns: some versions of the interpreter ignore a scalar mask.
        of_keys = head + 0 * column < HEADS + KEY_HEADS
        tl.store(keys_ptr + place, first, mask=is_column & of_keys)
        tl.store(keys_ptr + place + HALF, second, mask=is_column & of_keys)
        tl.store(values_ptr + place, first, mask=is_column & ~of_keys)
        tl.store(values_ptr + place + HALF, second, mask=is_column & ~of_keys)


@triton.jit
@no_type_check
def gate_kernel(gate_up_ptr, out_ptr, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Writes silu(gate) * up of a token; grid (T, tiles of F)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < SIZE
    gate = tl.load(gate_up_ptr + token * 2 * SIZE + column, mask=is_column, other=0.0)
    up = tl.load(gate_up_ptr + token * 2 * SIZE + SIZE + column, mask=is_column, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + token * SIZE + column, _times(silu, up), mask=is_column)


def add_norm(x: Tensor, update: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    """Adds `update` to x [T, C] in place, and writes the root-mean-square norm of the sum to `out`."""
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
    eps: float,
) -> None:
    """Norms and rotates the queries of qkv [T, (H + 2 G) D] in place, and writes keys and values to their slots.

    Args:
        qkv: of the layer's projection.
        norms: [D] of queries and of keys; None for a family without.
        rotation: cosines and sines [positions, D].
        keys: [G, S, D] of the layer.
        values: the same.
        tokens: int64 [6, T], of `PassTables`.
        eps: of the norms.
    """
    num_key_heads, num_slots, head_size = keys.shape
    num_units = qkv.shape[1] // head_size
    rotate_kernel[(qkv.shape[0], num_units)](
        qkv, *(norms or (qkv, qkv)), *rotation, keys, values, tokens, qkv.shape[0], num_slots, eps,
        HEADS=num_units - 2 * num_key_heads, KEY_HEADS=num_key_heads, HEAD_SIZE=head_size,
        PADDED=_power_of_two(head_size // 2), HAS_NORM=norms is not None, num_warps=1,
    )  # fmt: skip


def gate(gate_up: Tensor, out: Tensor) -> None:
    """Writes silu(gate) * up to `out` [T, F], from gate_up [T, 2 F]."""
    size = out.shape[1]
    gate_kernel[(out.shape[0], -(-size // _GATE_TILE))](gate_up, out, SIZE=size, TILE=_GATE_TILE, num_warps=4)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
