"""Triton functions that the kernels share: loading tiles, the softcap, and which pairs of a tile are visible.

Compiled by triton, or run by its interpreter on CPU. Names in capitals are compile-time constants.
"""

from typing import no_type_check

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels run in triton's interpreter."""


@triton.jit
@no_type_check
def load_rows(base, rows, stride, num_rows, MASK_ROWS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr):
    """A tile of rows, [R, PADDED]; zeros beyond the head size and, where rows are masked, from `num_rows` on."""
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
    """Writes a tile's rows before `num_rows` in the dtype of what they are written to."""
    columns = tl.arange(0, PADDED)
    mask = (rows[:, None] < num_rows) & (columns[None, :] < HEAD_SIZE)
    tl.store(base + rows[:, None] * stride + columns[None, :], tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def capped(products, TANH: tl.constexpr):
    """tanh(TANH * products / (2 log2 e)), by one exp2; the products as they are where TANH is 0."""
    if TANH == 0.0:
        return products
    # For large inputs the result is 1 anyway; the bound keeps exp2 from overflowing.
    return 1.0 - 2.0 / (tl.exp2(tl.minimum(products * TANH, 100.0)) + 1.0)


@triton.jit
@no_type_check
def rows_to_keys(rows, positions, first, stop, limit, HAS_WINDOW: tl.constexpr):
    """Which pairs are visible; arguments are shaped to broadcast, one side along rows, the other along keys."""
    visible = (first <= rows) & (rows < stop)
    if HAS_WINDOW:
        visible = visible & (positions < limit)
    return visible


@triton.jit
@no_type_check
def rows_to_tile(rows, positions, keys, num_keys, first_ptr, stop_ptr, limit_ptr, HAS_WINDOW: tl.constexpr):
    """Which pairs of rows and keys of a tile are visible, [rows, keys]; from pointers of its first key."""
    in_range = keys < num_keys
    first = tl.load(first_ptr + keys, mask=in_range, other=0)
    stop = tl.load(stop_ptr + keys, mask=in_range, other=0)
    limit = keys
    if HAS_WINDOW:
        limit = tl.load(limit_ptr + keys, mask=in_range, other=0)
    return rows_to_keys(rows[:, None], positions[:, None], first[None, :], stop[None, :], limit[None, :], HAS_WINDOW)
