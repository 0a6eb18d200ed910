"""The kernels of the `triton` backend, compiled by triton, or run by its interpreter on CPU.

The forward and the query gradient have one program per block of queries and head, which visits key blocks; the forward
keeps a running softmax. The key and value gradients have one program per block of keys and key head, which sums the
query heads of a group in one accumulator. Where several programs share such a block, each writes a partial sum to its
slot, and `add_slots_kernel` adds the slots in order: bitwise reproducible, without atomics. Names in capitals are
compile-time constants.
"""

from typing import no_type_check

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels run in triton's interpreter."""


@triton.jit
@no_type_check
def load_rows(base, rows, stride, num_rows, MASK_ROWS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load a tile of rows, [R, PADDED]; zeros beyond the head size and, where rows are masked, from `num_rows` on."""
    columns = tl.arange(0, PADDED)
    pointers = base + rows[:, None] * stride + columns[None, :]
    if MASK_ROWS:
        return tl.load(pointers, mask=(rows[:, None] < num_rows) & (columns[None, :] < HEAD_SIZE), other=0.0)
    if PADDED != HEAD_SIZE:
        return tl.load(pointers, mask=columns[None, :] < HEAD_SIZE, other=0.0)
    return tl.load(pointers)


@triton.jit
@no_type_check
def store_rows(base, tile, rows, stride, num_rows, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Write a tile's rows before `num_rows`, in the dtype of the destination."""
    columns = tl.arange(0, PADDED)
    mask = (rows[:, None] < num_rows) & (columns[None, :] < HEAD_SIZE)
    tl.store(base + rows[:, None] * stride + columns[None, :], tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def capped(products, TANH: tl.constexpr):
    """Return tanh(TANH * products / (2 log2 e)), by one exp2; the products as they are where TANH is 0."""
    if TANH == 0.0:
        return products
    # For large inputs the result is 1 anyway; the bound keeps exp2 from overflowing.
    return 1.0 - 2.0 / (tl.exp2(tl.minimum(products * TANH, 100.0)) + 1.0)


@triton.jit
@no_type_check
def rows_to_keys(rows, positions, first, stop, limit, HAS_WINDOW: tl.constexpr):
    """Return the mask of visible pairs; arguments broadcast, one side along rows, the other along keys."""
    visible = (first <= rows) & (rows < stop)
    if HAS_WINDOW:
        visible = visible & (positions < limit)
    return visible


@triton.jit
@no_type_check
def rows_to_tile(rows, positions, keys, num_keys, first_ptr, stop_ptr, limit_ptr, HAS_WINDOW: tl.constexpr):
    """Return the mask [rows, keys] of visible pairs of a tile, from pointers of its first key."""
    in_range = keys < num_keys
    first = tl.load(first_ptr + keys, mask=in_range, other=0)
    stop = tl.load(stop_ptr + keys, mask=in_range, other=0)
    limit = keys
    if HAS_WINDOW:
        limit = tl.load(limit_ptr + keys, mask=in_range, other=0)
    return rows_to_keys(rows[:, None], positions[:, None], first[None, :], stop[None, :], limit[None, :], HAS_WINDOW)


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
    """Compute outputs [H, N, D] and log2-sum-exp2 [H, N] of all queries; grid (H, items).

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
            # Read the block index one visit ahead, so that key loads do not wait for it.
            block = following
            following = tl.load(visits_ptr + visit + 1)
            at = block * KEY_TILE
            far = at.to(tl.int64)
            num_left = num_keys - at
            key = load_rows(key_base + far * key_stride, keys, key_stride, num_left, MASKED, HEAD_SIZE, PADDED)
            # FACTOR brings the scores to units of log 2.
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
    """Compute delta [H, N], each row's sum of out times its gradient, for the backward of the softmax."""
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
    """Compute the gradient [H, N, D] of all queries; grid (H, items)."""
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
    """Compute gradients [G, K, D] of keys and values, or partial sums [S, G, 2, KEY_TILE, D]; grid (G, items)."""
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
        # One loop covers all heads of the group, so that its pipeline fills once.

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
    """Add up the slots of each shared block, `ROWS` keys per program; grid (G, shared blocks, KEY_TILE / ROWS)."""
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
