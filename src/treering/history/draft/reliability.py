"""How well estimates of acceptance hold: a table of estimated and observed acceptance."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Drafted tokens whose acceptance was estimated alike.

    Example: 200 tokens estimated at 0.52 on average, of which 110 were accepted, have `accepted` 0.55.
    """

    num_drafted: int
    """Drafted tokens that were tried: those before them were accepted."""
    estimate: float
    """Mean estimate."""
    accepted: float
    """Share that was accepted."""


def as_bins(table: NDArray[np.float64]) -> tuple[ReliabilityBin, ...]:
    """The bins of a table [Z, 3] of counts, sums of estimates and accepted ones; empty bins are left out."""
    return tuple(
        ReliabilityBin(num_drafted=int(count), estimate=float(total / count), accepted=float(accepted / count))
        for count, total, accepted in table
        if count > 0
    )


def calibration_error(bins: tuple[ReliabilityBin, ...]) -> float:
    """Mean distance of estimate and share over all tried tokens (expected calibration error); 0 where there are none.

    Example: 100 tokens at 0.5 of which 60 were accepted, and 300 at 0.9 of which 270 were: (100 * 0.1 + 0) / 400.
    """
    num_tried = sum(item.num_drafted for item in bins)
    if num_tried == 0:
        return 0.0
    return sum(item.num_drafted * abs(item.estimate - item.accepted) for item in bins) / num_tried
