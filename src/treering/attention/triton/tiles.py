"""Tile sizes of the kernels by head size and dtype, and the warps and pipeline stages of their launches.

Sizes follow from what fits: accumulators in registers, tiles in shared memory.
"""

from types import MappingProxyType
from typing import NamedTuple

import torch

MAX_HEAD_SIZES = MappingProxyType({torch.bfloat16: 256, torch.float16: 256, torch.float32: 128})
"""The largest head size whose tiles fit into a multiprocessor, by supported dtype."""

MIN_PADDED_SIZE = 16
"""Fewest columns that matrix units multiply."""


class TileSize(NamedTuple):
    """A block of query rows against a block of keys."""

    queries: int
    keys: int


class Tiles(NamedTuple):
    """The tiles of the three kernels.

    Attributes:
        forward: of the kernel that computes outputs.
        query_gradient: of the one that sums over keys.
        key_gradient: of the one that sums over queries.
    """

    forward: TileSize
    query_gradient: TileSize
    key_gradient: TileSize


class LaunchConfig(NamedTuple):
    """Warps of a program and stages of its pipeline."""

    num_warps: int
    num_stages: int


def padded_size(head_size: int) -> int:
    """Columns that a head takes in a tile: a power of two. Head sizes of 80 and 96 take 128."""
    return max(MIN_PADDED_SIZE, 1 << (head_size - 1).bit_length())


def choose_tiles(head_size: int, dtype: torch.dtype) -> Tiles:
    """The tiles for a head size and a dtype.

    The accumulator of the query tile is the largest array in registers: 128 rows of 128 columns in float32 take a
    quarter of them. The key gradient has two accumulators, so it takes fewer query rows per visit. Above 128 columns
    rows are halved. A float32 tile is multiplied as three tf32 tiles.

    Example: heads of 128 in bfloat16 are computed forward in tiles of 128 queries and 64 keys.
    """
    if dtype in (torch.float32, torch.float64):
        size = 64 if padded_size(head_size) <= 64 else 32
        return Tiles(forward=TileSize(64, 32), query_gradient=TileSize(64, 32), key_gradient=TileSize(32, size))
    if padded_size(head_size) <= 128:
        return Tiles(forward=TileSize(128, 64), query_gradient=TileSize(128, 64), key_gradient=TileSize(64, 128))
    return Tiles(forward=TileSize(64, 64), query_gradient=TileSize(64, 64), key_gradient=TileSize(32, 64))


def launches(kernel: str, head_size: int, dtype: torch.dtype) -> tuple[LaunchConfig, ...]:
    """The launch options to time; the first is the default without timing.

    Example: launches("forward", 128, torch.bfloat16)[0] is 8 warps and 3 stages.
    """
    if dtype in (torch.float32, torch.float64):
        return (LaunchConfig(4, 2), LaunchConfig(8, 2))
    return _LAUNCHES[kernel, min(2, padded_size(head_size) // 128)]


_LAUNCHES = MappingProxyType(
    {
        ("forward", 0): (LaunchConfig(4, 3), LaunchConfig(8, 3), LaunchConfig(4, 4)),
        ("forward", 1): (LaunchConfig(8, 3), LaunchConfig(8, 2)),
        ("forward", 2): (LaunchConfig(8, 2), LaunchConfig(4, 2)),
        ("query_gradient", 0): (LaunchConfig(8, 3), LaunchConfig(4, 3)),
        ("query_gradient", 1): (LaunchConfig(8, 3), LaunchConfig(8, 2)),
        ("query_gradient", 2): (LaunchConfig(8, 2), LaunchConfig(4, 2)),
        ("key_gradient", 0): (LaunchConfig(8, 3), LaunchConfig(8, 2)),
        ("key_gradient", 1): (LaunchConfig(8, 2), LaunchConfig(8, 3)),
        ("key_gradient", 2): (LaunchConfig(8, 2), LaunchConfig(8, 1)),
    }
)
"""By kernel, and by padded head size: below 128 columns, 128, more.

Chosen from the compiler's reports for compute capability 9.0: few or no spilled registers, and less shared memory than
a multiprocessor has.
"""
