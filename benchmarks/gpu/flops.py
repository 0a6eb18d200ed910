"""Counts of attention work: visible pairs, and FLOPs by pass."""

from types import MappingProxyType

import numpy as np

from treering.tree.forest import Forest

FLOPS_PER_PAIR = MappingProxyType({"forward": 4, "backward": 10, "both": 14})
"""Per head and unit of its size. Forward: two products of 2 each; backward: five, one of which recomputes the scores.
Other work of a kernel (masked pairs, more recomputation) does not count."""

PASSES = tuple(FLOPS_PER_PAIR)

DENSE_TFLOPS = MappingProxyType({"H100": 989, "H200": 989, "B200": 2250, "A100": 312})
"""Vendors' dense bfloat16 rates of the SXM forms, by a part of the device's name."""


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


def peak_tflops(device_name: str) -> float | None:
    """The vendor's dense bfloat16 rate of a device in TFLOP/s; None for an unknown one.

    Example: "NVIDIA H100 80GB HBM3" has 989.
    """
    return next((rate for part, rate in DENSE_TFLOPS.items() if part in device_name), None)
