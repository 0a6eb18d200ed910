"""The cost of a call of a recurrent layer, in tokens, to choose between forking and rescanning.

Every level of forks takes at least one more call per layer; without it, the tokens above the fork are computed once per
branch. Only the ratio of the two costs matters.
"""

from typing import NamedTuple

import torch


class Price(NamedTuple):
    """Cost of a call and of a row of a call, in tokens, in addition to their own tokens."""

    call: int
    row: int


PRICES = {"cpu": Price(call=32, row=32), "cuda": Price(call=50_000, row=32)}
"""By type of device.

cpu: measured on one core, layers of width 256 and 768 with heads of 64, forward and backward in float32: a call costs
20 to 46 tokens, a row 23 to 41, because scans compute whole chunks of 64. cuda: the published figure of axolotl's tree
recurrence, 10 ms of host time per call against 0.2 us per token, from its own machine; it has not been measured here.
"""

MAX_GROWTH = 2.0
"""Rescanning and padding may compute at most this many times the forest's tokens, because tokens take memory."""


def price_on(device: torch.device) -> Price:
    """The price on a device; other accelerators use CUDA's.

    Example: on a CPU a call costs 32 tokens, so forking nearly always pays.
    """
    return PRICES.get(device.type, PRICES["cuda"])
