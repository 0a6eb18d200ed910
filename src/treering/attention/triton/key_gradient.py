"""Kernels of the key and value gradients: one program per block of keys and key head, a sum over the queries.

The query heads of a group are summed in one accumulator. Where several programs share a block, each writes a partial
sum to its slot, and `add_slots_kernel` adds the slots in order: bitwise reproducible, without atomics.
"""

from typing import no_type_check

import triton
import triton.language as tl

from treering.attention.triton.ops import capped, load_rows, rows_to_keys, store_rows


@triton.jit
@no_type_check
def key_gradient_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_ptr,
    grad_key_ptr,
    grad_value_ptr,
    slots_ptr,
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
    grad_key_head_stride,
    grad_key_stride,
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
    """Gradients [G, K, D] of keys and values, or partial sums [S, G, 2, KEY_TILE, D]; grid (G, items)."""
    key_head = tl.program_id(0).to(tl.int64)
    item = items_ptr + tl.program_id(1) * 6
    begin = tl.load(item) * KEY_TILE
    slot = tl.load(item + 5)
    local = tl.arange(0, KEY_TILE)
    left = num_keys - begin
    far = begin.to(tl.int64)
    key_base = key_ptr + key_head * key_head_stride + far * key_stride
    value_base = value_ptr + key_head * value_head_stride + far * value_stride
    key = load_rows(key_base, local, key_stride, left, True, HEAD_SIZE, PADDED)
    value = load_rows(value_base, local, value_stride, left, True, HEAD_SIZE, PADDED)
    first = tl.load(first_ptr + begin + local, mask=local < left, other=0)
    last = tl.load(stop_ptr + begin + local, mask=local < left, other=0)
    limit = tl.load(limit_ptr + begin + local, mask=local < left, other=0)
    total_key = tl.zeros([KEY_TILE, PADDED], WIDE)
    total_value = tl.zeros([KEY_TILE, PADDED], WIDE)
    queries = tl.arange(0, QUERY_TILE)
    for MASKED in tl.static_range(2):
        start = tl.load(item + 1 + 2 * MASKED)
        count = tl.load(item + 2 + 2 * MASKED) - start
        following = tl.load(visits_ptr + start)
        # All heads of the group in one loop, so that its pipeline fills once.
        for step in tl.range(0, GROUPS * count):
            head = key_head * GROUPS + step // count
            block = following
            following = tl.load(visits_ptr + start + (step + 1) % count)
            at = block * QUERY_TILE
            away = at.to(tl.int64)
            num_left = num_queries - at
            rows = at + queries
            query_base = query_ptr + head * query_head_stride + away * query_stride
            query = load_rows(query_base, queries, query_stride, num_left, MASKED, HEAD_SIZE, PADDED)
            statistics = head * num_queries + rows
            if MASKED:
                lse = tl.load(lse_ptr + statistics, mask=queries < num_left, other=0.0)
                delta = tl.load(delta_ptr + statistics, mask=queries < num_left, other=0.0)
            else:
                lse = tl.load(lse_ptr + statistics)
                delta = tl.load(delta_ptr + statistics)
            scores = capped(tl.dot(key, tl.trans(query), input_precision="tf32x3", out_dtype=WIDE), TANH)
            exponents = scores * FACTOR - lse[None, :]
            if MASKED:
                positions = rows
                if HAS_WINDOW:
                    positions = tl.load(position_ptr + rows, mask=queries < num_left, other=0)
                visible = rows_to_keys(
                    rows[None, :], positions[None, :], first[:, None], last[:, None], limit[:, None], HAS_WINDOW
                )
                exponents = tl.where(visible, exponents, float("-inf"))
            weights = tl.exp2(exponents)
            grad_base = grad_ptr + head * grad_head_stride + away * grad_stride
            grad = load_rows(grad_base, queries, grad_stride, num_left, MASKED, HEAD_SIZE, PADDED)
            total_value = tl.dot(weights.to(grad.dtype), grad, total_value, input_precision="tf32x3", out_dtype=WIDE)
            grad_weights = tl.dot(value, tl.trans(grad), input_precision="tf32x3", out_dtype=WIDE)
            grad_scores = weights * (grad_weights - delta[None, :])
            if TANH != 0.0:
                grad_scores = grad_scores * (1.0 - scores * scores)
            total_key = tl.dot(grad_scores.to(query.dtype), query, total_key, input_precision="tf32x3", out_dtype=WIDE)
    total_key = total_key * SCALE
    if slot < 0:
        base = key_head * grad_key_head_stride + far * grad_key_stride
        store_rows(grad_key_ptr + base, total_key, local, grad_key_stride, left, HEAD_SIZE, PADDED)
        store_rows(grad_value_ptr + base, total_value, local, grad_key_stride, left, HEAD_SIZE, PADDED)
    else:
        base = (slot * tl.num_programs(0) + key_head) * (2 * KEY_TILE * HEAD_SIZE)
        store_rows(slots_ptr + base, total_key, local, HEAD_SIZE, KEY_TILE, HEAD_SIZE, PADDED)
        value_slot = slots_ptr + base + KEY_TILE * HEAD_SIZE
        store_rows(value_slot, total_value, local, HEAD_SIZE, KEY_TILE, HEAD_SIZE, PADDED)


@triton.jit
@no_type_check
def add_slots_kernel(
    grad_key_ptr,
    grad_value_ptr,
    slots_ptr,
    splits_ptr,
    num_keys,
    grad_key_head_stride,
    grad_key_stride,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Adds up the slots of each shared block, `ROWS` keys per program; grid (G, shared blocks, KEY_TILE / ROWS)."""
    key_head = tl.program_id(0).to(tl.int64)
    split = splits_ptr + tl.program_id(1) * 3
    offset = tl.program_id(2) * ROWS
    local = tl.arange(0, ROWS)
    total_key = tl.zeros([ROWS, PADDED], WIDE)
    total_value = tl.zeros([ROWS, PADDED], WIDE)
    for slot in tl.range(tl.load(split + 1), tl.load(split + 2)):
        key_slot = slots_ptr + ((slot * tl.num_programs(0) + key_head) * (2 * KEY_TILE) + offset) * HEAD_SIZE
        total_key += load_rows(key_slot, local, HEAD_SIZE, ROWS, False, HEAD_SIZE, PADDED)
        value_slot = key_slot + KEY_TILE * HEAD_SIZE
        total_value += load_rows(value_slot, local, HEAD_SIZE, ROWS, False, HEAD_SIZE, PADDED)
    begin = tl.load(split) * KEY_TILE + offset
    base = key_head * grad_key_head_stride + begin.to(tl.int64) * grad_key_stride
    left = num_keys - begin
    store_rows(grad_key_ptr + base, total_key, local, grad_key_stride, left, HEAD_SIZE, PADDED)
    store_rows(grad_value_ptr + base, total_value, local, grad_key_stride, left, HEAD_SIZE, PADDED)
