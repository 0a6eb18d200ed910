"""The forward kernel: one program per block of queries and head, online softmax over the key blocks it visits."""

from typing import no_type_check

import triton
import triton.language as tl

from treering.attention.triton.ops import capped, load_rows, rows_to_tile, store_rows


@triton.jit
@no_type_check
def forward_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
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
    out_head_stride,
    out_stride,
    GROUPS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FACTOR: tl.constexpr,
    TANH: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Out [H, N, D] and log2-sum-exp2 [H, N] of all queries; grid (H, items).

    Unmasked blocks come first, so that most rows have a finite peak before masked blocks that may hide all their keys.
    """
    head = tl.program_id(0).to(tl.int64)
    item = items_ptr + tl.program_id(1) * 6
    begin = tl.load(item) * QUERY_TILE
    local = tl.arange(0, QUERY_TILE)
    rows = begin + local
    left = num_queries - begin
    query_base = query_ptr + head * query_head_stride + begin.to(tl.int64) * query_stride
    query = load_rows(query_base, local, query_stride, left, True, HEAD_SIZE, PADDED)
    positions = rows
    if HAS_WINDOW:
        positions = tl.load(position_ptr + rows, mask=local < left, other=0)
    key_base = key_ptr + head // GROUPS * key_head_stride
    value_base = value_ptr + head // GROUPS * value_head_stride
    out = tl.zeros([QUERY_TILE, PADDED], WIDE)
    total = tl.zeros([QUERY_TILE], WIDE)
    peak = tl.full([QUERY_TILE], float("-inf"), WIDE)
    keys = tl.arange(0, KEY_TILE)
    for MASKED in tl.static_range(2):
        start = tl.load(item + 1 + 2 * MASKED)
        stop = tl.load(item + 2 + 2 * MASKED)
        following = tl.load(visits_ptr + start)
        for visit in tl.range(start, stop):
            # The block number is read one visit ahead, so that key loads do not wait for it.
            block = following
            following = tl.load(visits_ptr + visit + 1)
            at = block * KEY_TILE
            far = at.to(tl.int64)
            num_left = num_keys - at
            key = load_rows(key_base + far * key_stride, keys, key_stride, num_left, MASKED, HEAD_SIZE, PADDED)
            # In units of log 2 once multiplied by FACTOR.
            scores = capped(tl.dot(query, tl.trans(key), input_precision="tf32x3", out_dtype=WIDE), TANH)
            if MASKED:
                ranges = first_ptr + at, stop_ptr + at, limit_ptr + at
                visible = rows_to_tile(rows, positions, keys, num_left, *ranges, HAS_WINDOW)
                scores = tl.where(visible, scores, float("-inf"))
            highest = tl.maximum(peak, tl.max(scores, 1) * FACTOR)
            # A row without a visible key so far has a peak of -inf, and -inf - -inf is NaN.
            shift = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
            weights = tl.exp2(scores * FACTOR - shift[:, None])
            shrink = tl.exp2(peak - shift)
            total = total * shrink + tl.sum(weights, 1)
            value = load_rows(value_base + far * value_stride, keys, value_stride, num_left, MASKED, HEAD_SIZE, PADDED)
            out = out * shrink[:, None]
            out = tl.dot(weights.to(value.dtype), value, out, input_precision="tf32x3", out_dtype=WIDE)
            peak = highest
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head)
        highest = tl.maximum(peak, sink)
        shrink = tl.exp2(peak - highest)
        total = total * shrink + tl.exp2(sink - highest)
        out = out * shrink[:, None]
        peak = highest
    # Rows past the end saw no key; they are not written.
    total = tl.where(total == 0.0, 1.0, total)
    out_base = out_ptr + head * out_head_stride + begin.to(tl.int64) * out_stride
    store_rows(out_base, out / total[:, None], local, out_stride, left, HEAD_SIZE, PADDED)
    tl.store(lse_ptr + head * num_queries + rows, peak + tl.log2(total), mask=local < left)
