"""Matrix products with few rows, bound by reading the matrix once: one program per tile of columns.

Each step multiplies a tile of the matrix by all rows, to fill the matrix units as far as so few rows allow. If there
are too few column tiles to keep all multiprocessors busy, the depth is split into parts (split-K), which a second
kernel adds in a fixed order, so results are bitwise reproducible.

    T tokens   N columns   K depth   I tiles of columns   P parts of the depth
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from treering.attention.triton.ops import INTERPRETED
from treering.engine.decoder.cuda.attention import factor

MAX_TOKENS = 64
"""Products with more rows are bound by arithmetic, where torch's libraries are best."""

WIDTHS = (64, 32, 16)
_STEP = 8192
"""Elements of a step's larger operand; both operands take 20 to 32 KiB, and several steps are in flight."""
NUM_STAGES = 4

_MAX_PARTS = 8
_FULL = 0.9
_ADDED_TILE = 1024


class LinearTile(NamedTuple):
    """How a product is tiled.

    Example: 32 columns in one part give 128 programs for a matrix of 4,096 columns.
    """

    columns: int
    parts: int


@triton.jit(do_not_specialize=["num_tokens"])
@no_type_check
def linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    num_tokens,
    num_columns,
    depth,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Writes x [T, K] times the transposed weight [N, K] to out [T, N], or sums of parts to [P, T, N]; grid (I, P)."""
    part = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.arange(0, TOKENS)
    is_token = token < num_tokens
    # Columns after the last read the last one, which needs no mask.
    weights = weight_ptr + tl.minimum(column, num_columns - 1).to(tl.int64)[:, None] * depth
    rows = x_ptr + token[:, None] * depth
    per_part = tl.cdiv(tl.cdiv(depth, STEP), PARTS) * STEP
    begin = part * per_part
    end = tl.minimum(begin + per_part, depth)
    total = tl.zeros([COLUMNS, TOKENS], tl.float32)
    for at in tl.range(begin, end, STEP):
        place = at + tl.arange(0, STEP)[None, :]
        weight = tl.load(weights + place, mask=place < end, other=0.0)
        x = tl.load(rows + place, mask=is_token[:, None] & (place < end), other=0.0)
        total = tl.dot(factor(weight, WIDE), factor(tl.trans(x), WIDE), total, out_dtype=tl.float32)
    is_out = is_token[:, None] & (column < num_columns)[None, :]
    place = token[:, None] * num_columns + column[None, :]
    total = tl.trans(total)
    if PARTS > 1:
        tl.store(parts_ptr + part.to(tl.int64) * num_tokens * num_columns + place, total, mask=is_out)
    else:
        if HAS_BIAS:
            bias = tl.load(bias_ptr + column, mask=column < num_columns, other=0.0)
            total += bias.to(tl.float32)[None, :]
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["num_tokens"])
@no_type_check
def add_depths_kernel(
    parts_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_columns,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Adds the sums over parts of the depth [P, T, N] in order into out [T, N]; grid (T, tiles of N)."""
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < num_columns
    place = tl.program_id(0) * num_columns + column
    total = tl.load(parts_ptr + place, mask=is_column, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + part * num_tokens * num_columns + place, mask=is_column, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=is_column)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: LinearTile, parts: Tensor | None) -> None:
    """Writes x times the transposed weight, plus the bias, to out; sums in float32 and rounds once.

    Args:
        x: [T, K], contiguous, T up to 64; bfloat16 or float16, like all tensors but parts.
        weight: [N, K], contiguous.
        bias: [N] or None.
        out: [T, N], contiguous.
        tile: how to tile it.
        parts: float32 [P, T, N], overwritten; None if the tile has one part.

    Example: x [[1, 2]] and weight [[3, 4], [5, 6]] give [[11, 17]].
    """
    (num_tokens, depth), num_columns = x.shape, weight.shape[0]
    assert num_tokens <= MAX_TOKENS
    assert all(tensor.is_contiguous() for tensor in (x, weight, out))
    tokens = padded_tokens(num_tokens)
    linear_kernel[(-(-num_columns // tile.columns), tile.parts)](
        x, weight, weight if bias is None else bias, out, out if parts is None else parts,
        num_tokens, num_columns, depth, TOKENS=tokens, COLUMNS=tile.columns, STEP=step_of(tokens, tile.columns),
        PARTS=tile.parts, HAS_BIAS=bias is not None, WIDE=INTERPRETED, num_warps=4, num_stages=NUM_STAGES,
    )  # fmt: skip
    if parts is not None:
        add_depths_kernel[(num_tokens, -(-num_columns // _ADDED_TILE))](
            parts, weight if bias is None else bias, out, num_tokens, num_columns,
            PARTS=tile.parts, HAS_BIAS=bias is not None, TILE=_ADDED_TILE, num_warps=4,
        )  # fmt: skip


def padded_tokens(num_tokens: int) -> int:
    """Rows of a product after padding: 16, 32 or 64.

    Example: 1 token takes 16 rows, and 17 take 32.
    """
    return max(16, 1 << (num_tokens - 1).bit_length())


def step_of(tokens: int, columns: int) -> int:
    """Depth that a step of a tile reads.

    Example: 256 for 16 rows and 32 columns, 16 KiB of a matrix in bfloat16.
    """
    return _STEP // max(tokens, columns)


def tiles_of(weight: Tensor, num_tokens: int, num_processors: int) -> list[LinearTile]:
    """The two best candidate tiles: fewest parts first, then widest; [] for products that the kernel does not support.

    A tile is split into parts until nine of ten multiprocessors are busy. The depth must be a multiple of 16, or the
    matrix would be read in small pieces.

    Example: with 132 multiprocessors a matrix of 4,096 columns has tiles of 32 and of 16, and one of 2,048 columns has
    tiles of 16, and of 32 in two parts.
    """
    if weight.dtype not in (torch.bfloat16, torch.float16) or num_tokens > MAX_TOKENS or weight.shape[1] % 16:
        return []
    return sorted((_tile(weight, columns, num_tokens, num_processors) for columns in WIDTHS), key=_cost_order)[:2]


def _cost_order(tile: LinearTile) -> tuple[int, int]:
    return tile.parts, -tile.columns


def _tile(weight: Tensor, columns: int, num_tokens: int, num_processors: int) -> LinearTile:
    num_tiles = -(-weight.shape[0] // columns)
    num_steps = -(-weight.shape[1] // step_of(padded_tokens(num_tokens), columns))
    parts = 1
    while parts * num_tiles < _FULL * num_processors and 2 * parts <= min(_MAX_PARTS, num_steps):
        parts *= 2
    return LinearTile(columns, parts)
