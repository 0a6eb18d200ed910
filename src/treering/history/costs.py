"""What an engine's pass over so many tokens takes, as drafting weighs it against what it may gain.

Knows two columns of numbers; knows nothing of how they are measured or spent.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyCosts:
    """Seconds of a pass by its tokens: linear between the entries, with the last slope beyond.

    Attributes:
        num_tokens: int64 [K], K >= 1, >= 1 and ascending.
        seconds: float64 [K], > 0 and never falling.

    Raises:
        InputError: columns that break these rules.

    Example: num_tokens [1, 8] and seconds [0.001, 0.0024] say that a token more costs 0.2 ms.
    """

    num_tokens: NDArray[np.int64]
    seconds: NDArray[np.float64]

    def __post_init__(self) -> None:
        sizes, seconds = np.asarray(self.num_tokens), np.asarray(self.seconds)
        if sizes.ndim != 1 or sizes.shape != seconds.shape or sizes.size == 0:
            raise InputError(
                f"costs have as many seconds as sizes, one or more, got shapes {sizes.shape} and {seconds.shape}; pair "
                "them"
            )
        if sizes[0] < 1 or (np.diff(sizes) <= 0).any() or not seconds[0] > 0 or not (np.diff(seconds) >= 0).all():
            raise InputError(
                f"num_tokens ascend from 1 or more, and seconds are above 0 and never fall, got {sizes.tolist()} and "
                f"{seconds.tolist()}; sort and smooth them"
            )
