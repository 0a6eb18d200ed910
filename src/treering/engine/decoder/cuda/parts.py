"""Combines attention over parts of the keys (split-KV).

The order of the sums is fixed, so results are bitwise reproducible.

    T tokens   H query heads   D head size   P parts
"""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

MAX_PARTS = 32
_PROGRAMS = 4
"""Programs per multiprocessor, enough to hide memory latency."""


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
