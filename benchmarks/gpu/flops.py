"""Counts of attention work: visible pairs, and FLOPs by pass."""

from types import MappingProxyType

import numpy as np

from treering.tree.forest import Forest

FLOPS_PER_PAIR = MappingProxyType({"forward": 4, "backward": 10, "both": 14})
"""Per head and unit of its size. Forward: two products of 2 each; backward: five, one of which recomputes the scores.
Other work of a kernel (masked pairs, more recomputation) does not count."""

PASSES = tuple(FLOPS_PER_PAIR)


def num_visible_pairs(forest: Forest, window: int | None = None) -> int:
    """(query, visible key) pairs of a forest under a window in positions.

    Example: the chain 5, 6, 7 has 1 + 2 + 3 = 6, and with a window of 2 it has 1 + 2 + 2 = 5.
    """
    seen = forest.position.astype(np.int64) + 1
    return int(seen.sum() if window is None else np.minimum(seen, window).sum())


def attention_flops(num_pairs: int, *, num_heads: int, head_size: int, of: str) -> int:
    """FLOPs of one pass ("forward", "backward" or "both") over that many visible pairs.

    Example: 6 pairs with 2 heads of size 8 take 4 * 6 * 2 * 8 = 384 forward and 960 backward.
    """
    return FLOPS_PER_PAIR[of] * num_pairs * num_heads * head_size


def tera_per_second(flops: int, seconds: float) -> float:
    """Example: 2e12 FLOPs in half a second are 4 TFLOP/s."""
    return flops / seconds / 1e12
