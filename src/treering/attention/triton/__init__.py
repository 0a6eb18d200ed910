"""The `triton` backend: kernels that read each key's range of query rows and skip blocks that no row sees.

Importing this does not import triton: kernels are loaded on first use.
"""

from treering.attention.triton.backend import has_triton, triton_attention
from treering.attention.triton.tiles import MAX_HEAD_SIZES, Tiles, TileSize

__all__ = ["MAX_HEAD_SIZES", "TileSize", "Tiles", "has_triton", "triton_attention"]
