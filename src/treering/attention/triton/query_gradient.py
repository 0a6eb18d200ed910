"""Kernels of the query gradient: one program per block of queries and head, a sum over the keys it visits."""

from typing import no_type_check

import triton
import triton.language as tl

from treering.attention.triton.ops import capped, load_rows, rows_to_tile, store_rows


@triton.jit
@no_type_check
def delta_kernel(
    out_ptr,
    grad_ptr,
    delta_ptr,
    num_queries,
    out_head_stride,
    out_stride,
    grad_head_stride,
    grad_stride,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Delta [H, N], each row's sum of out times its gradient: what the softmax takes off all scores' gradients."""
    head = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * QUERY_TILE
    local = tl.arange(0, QUERY_TILE)
    left = num_queries - begin
    out_base = out_ptr + head * out_head_stride + begin.to(tl.int64) * out_stride
    grad_base = grad_ptr + head * grad_head_stride + begin.to(tl.int64) * grad_stride
    out = load_rows(out_base, local, out_stride, left, True, HEAD_SIZE, PADDED).to(WIDE)
    grad = load_rows(grad_base, local, grad_stride, left, True, HEAD_SIZE, PADDED).to(WIDE)
    tl.store(delta_ptr + head * num_queries + begin + local, tl.sum(out * grad, 1), mask=local < left)


@triton.jit
@no_type_check
def query_gradient_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_ptr,
    grad_query_ptr,
    lse_ptr,
    delta_ptr,
    first_ptr,
    stop_ptr,
    limit_ptr,
    position_ptr,
    items_ptr,
    visits_ptr,
    num_queries,
    num_keys,
    query_head_stride,
    query_stride,
    key_head_stride,
    key_stride,
    value_head_stride,
    value_stride,
    grad_head_stride,
    grad_stride,
    grad_query_head_stride,
    grad_query_stride,
    GROUPS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    FACTOR: tl.constexpr,
    TANH: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Gradient [H, N, D] of all queries; grid (H, items)."""
    head = tl.program_id(0).to(tl.int64)
    item = items_ptr + tl.program_id(1) * 6
    begin = tl.load(item) * QUERY_TILE
    local = tl.arange(0, QUERY_TILE)
    rows = begin + local
    left = num_queries - begin
    far = begin.to(tl.int64)
    query_base = query_ptr + head * query_head_stride + far * query_stride
    grad_base = grad_ptr + head * grad_head_stride + far * grad_stride
    query = load_rows(query_base, local, query_stride, left, True, HEAD_SIZE, PADDED)
    grad = load_rows(grad_base, local, grad_stride, left, True, HEAD_SIZE, PADDED)
    lse = tl.load(lse_ptr + head * num_queries + rows, mask=local < left, other=0.0)
    delta = tl.load(delta_ptr + head * num_queries + rows, mask=local < left, other=0.0)
    positions = rows
    if HAS_WINDOW:
        positions = tl.load(position_ptr + rows, mask=local < left, other=0)
    key_base = key_ptr + head // GROUPS * key_head_stride
    value_base = value_ptr + head // GROUPS * value_head_stride
    total = tl.zeros([QUERY_TILE, PADDED], WIDE)
    keys = tl.arange(0, KEY_TILE)
    for MASKED in tl.static_range(2):
        start = tl.load(item + 1 + 2 * MASKED)
        stop = tl.load(item + 2 + 2 * MASKED)
        following = tl.load(visits_ptr + start)
        for visit in tl.range(start, stop):
            block = following
            following = tl.load(visits_ptr + visit + 1)
            at = block * KEY_TILE
            away = at.to(tl.int64)
            num_left = num_keys - at
            key = load_rows(key_base + away * key_stride, keys, key_stride, num_left, MASKED, HEAD_SIZE, PADDED)
            value = load_rows(value_base + away * value_stride, keys, value_stride, num_left, MASKED, HEAD_SIZE, PADDED)
            scores = capped(tl.dot(query, tl.trans(key), input_precision="tf32x3", out_dtype=WIDE), TANH)
            exponents = scores * FACTOR - lse[:, None]
            if MASKED:
                ranges = first_ptr + at, stop_ptr + at, limit_ptr + at
                visible = rows_to_tile(rows, positions, keys, num_left, *ranges, HAS_WINDOW)
                exponents = tl.where(visible, exponents, float("-inf"))
            grad_weights = tl.dot(grad, tl.trans(value), input_precision="tf32x3", out_dtype=WIDE)
            grad_scores = tl.exp2(exponents) * (grad_weights - delta[:, None])
            if TANH != 0.0:
                grad_scores = grad_scores * (1.0 - scores * scores)
            total = tl.dot(grad_scores.to(key.dtype), key, total, input_precision="tf32x3", out_dtype=WIDE)
    out_base = grad_query_ptr + head * grad_query_head_stride + far * grad_query_stride
    store_rows(out_base, total * SCALE, local, grad_query_stride, left, HEAD_SIZE, PADDED)
