"""Seconds that an engine's pass takes by its tokens, and seconds that drafting takes."""

from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPrices:
    """Seconds that a step spends on drafts in addition to its pass, all finite and >= 0.

    The defaults were measured after passes of a small model, on slow cores: a pass fills their caches with weights.

    Attributes:
        look: per step that looks for drafts, whatever it finds.
        row: per row of such a step.
        grown: per token that is likely enough to be considered, drafted or not.
        learn: per step with drafts, for learning from their outcome.
        drafted: per drafted token, in addition to its share of the pass.

    Raises:
        InputError: a price is negative or not finite.

    Example: by the defaults, 8 rows with 60 tokens grown, 40 of them drafted, take 90 us + 60 us to look and
    40 us + 40 us to learn.
    """

    look: float = 50e-6
    row: float = 5e-6
    grown: float = 1e-6
    learn: float = 40e-6
    drafted: float = 1e-6

    def __post_init__(self) -> None:
        prices = astuple(self)
        if not all(0 <= price < np.inf for price in prices):
            raise InputError(f"prices are seconds, finite and 0 or more, got {prices}; correct them, or leave them out")

    def of_looking(self, num_rows: int, num_grown: float = 0.0) -> float:
        """Seconds of looking for drafts, with so many tokens grown."""
        return self.look + self.row * num_rows + self.grown * num_grown

    def of_drafting(self, num_rows: int, num_grown: float, num_drafted: int) -> float:
        """Seconds of looking for drafts and of learning from their outcome."""
        return self.of_looking(num_rows, num_grown) + self.learn + self.drafted * num_drafted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyCosts:
    """Seconds of a pass by its tokens: linear between the entries, with the last slope beyond; and of drafting.

    Attributes:
        num_tokens: int64 [K], K >= 1, >= 1 and ascending; lists become arrays.
        seconds: float64 [K], > 0, finite and never falling.
        prices: of drafting.

    Raises:
        InputError: columns that break these rules.

    Example: num_tokens [1, 8] and seconds [0.001, 0.0024] mean 0.2 ms per further token.
    """

    num_tokens: NDArray[np.int64]
    seconds: NDArray[np.float64]
    prices: DraftPrices = DraftPrices()

    def __post_init__(self) -> None:
        sizes, seconds = _as_numbers(self.num_tokens, "iu"), _as_numbers(self.seconds, "iuf")
        if not isinstance(self.prices, DraftPrices):
            raise InputError(
                f"prices of drafting are a DraftPrices, got {self.prices!r}; leave them out for the defaults"
            )
        if sizes.ndim != 1 or sizes.shape != seconds.shape or sizes.size == 0:
            raise InputError(
                f"costs have as many seconds as sizes, one or more, got shapes {sizes.shape} and {seconds.shape}; pair "
                "them"
            )
        rises = (np.diff(sizes) > 0).all() and (np.diff(seconds) >= 0).all()
        if not (sizes[0] >= 1 and seconds[0] > 0 and rises and np.isfinite(seconds).all()):
            raise InputError(
                f"num_tokens ascend from 1 or more, and seconds are above 0, finite and never fall, got "
                f"{sizes.tolist()} and {seconds.tolist()}; sort and smooth them"
            )
        object.__setattr__(self, "num_tokens", sizes.astype(np.int64))
        object.__setattr__(self, "seconds", seconds.astype(np.float64))


def _as_numbers(values: object, kinds: str) -> NDArray[Any]:
    """A column as an array, checked for its kind of numbers."""
    try:
        column = np.asarray(values)
    except ValueError as error:
        raise InputError(f"a column of costs has one number per entry, got {values!r}; flatten it") from error
    if column.dtype.kind not in kinds:
        raise InputError(f"num_tokens are whole numbers and seconds numbers, got {values!r}; correct them")
    return column
