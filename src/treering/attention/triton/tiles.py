"""Tile sizes of the kernels by head size and dtype, and the warps and pipeline stages of their launches.

Sizes follow from what fits: accumulators in registers, tiles in shared memory.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

MAX_HEAD_SIZES = MappingProxyType({torch.bfloat16: 256, torch.float16: 256, torch.float32: 128})
"""The largest head whose tiles fit into a multiprocessor, by the dtypes that the kernels compute in."""

MIN_PADDED_SIZE = 16
"""Matrix units multiply at least so many columns."""


class Tile(NamedTuple):
    """A block of query rows against a block of keys."""

    queries: int
    keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The tiles of the three kernels.

    Attributes:
        forward: of the kernel that computes outputs.
        query_gradient: of the one that sums over keys.
        key_gradient: of the one that sums over queries.
        max_visits: query blocks that one program of the latter visits in each head; None leaves it to a rule.
    """

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile
    max_visits: int | None = None


class Launch(NamedTuple):
    """Warps of a program and stages of its pipeline."""

    num_warps: int
    num_stages: int


def padded_size(head_size: int) -> int:
    """Columns that a head takes in a tile: a power of two. Head sizes of 80 and 96 take 128."""
    return max(MIN_PADDED_SIZE, 1 << (head_size - 1).bit_length())


def choose_tiles(head_size: int, dtype: torch.dtype) -> Tiles:
    """The tiles for a head size and a dtype.

    Queries stay while keys pass by, and the accumulator of what stays is the largest thing in registers: 128 rows of
    128 columns in float32 are a quarter of them. The key gradient has two accumulators and so takes fewer query rows
    per visit. Above 128 columns rows are halved. A float32 tile is three tiles of tf32 while it is multiplied.

    Example: heads of 128 in bfloat16 are computed forward in tiles of 128 queries and 64 keys.
    """
    if dtype in (torch.float32, torch.float64):
        size = 64 if padded_size(head_size) <= 64 else 32
        return Tiles(forward=Tile(64, 32), query_gradient=Tile(64, 32), key_gradient=Tile(32, size))
    if padded_size(head_size) <= 128:
        return Tiles(forward=Tile(128, 64), query_gradient=Tile(128, 64), key_gradient=Tile(64, 128))
    return Tiles(forward=Tile(64, 64), query_gradient=Tile(64, 64), key_gradient=Tile(32, 64))


def launches(kernel: str, head_size: int, dtype: torch.dtype) -> tuple[Launch, ...]:
    """The launches worth timing, the first of which is right without timing.

    Example: launches("forward", 128, torch.bfloat16)[0] is 8 warps and 3 stages.
    """
    if dtype in (torch.float32, torch.float64):
        return (Launch(4, 2), Launch(8, 2))
    return _LAUNCHES[kernel, min(2, padded_size(head_size) // 128)]


_LAUNCHES = MappingProxyType(
    {
        ("forward", 0): (Launch(4, 3), Launch(8, 3), Launch(4, 4)),
        ("forward", 1): (Launch(8, 3), Launch(8, 2)),
        ("forward", 2): (Launch(8, 2), Launch(4, 2)),
        ("query_gradient", 0): (Launch(8, 3), Launch(4, 3)),
        ("query_gradient", 1): (Launch(8, 3), Launch(8, 2)),
        ("query_gradient", 2): (Launch(8, 2), Launch(4, 2)),
        ("key_gradient", 0): (Launch(8, 3), Launch(8, 2)),
        ("key_gradient", 1): (Launch(8, 2), Launch(8, 3)),
        ("key_gradient", 2): (Launch(8, 2), Launch(8, 1)),
    }
)
"""By kernel and by whether a head takes less than 128 columns, 128 or more.

Chosen from what the compiler says of each for compute capability 9.0: no or few spilled registers, and less shared
memory than a multiprocessor has.
"""
