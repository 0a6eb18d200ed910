"""How much a drafter drafts: by a least acceptance, or by what passes of its engine cost.

Knows costs, and what has paid in the steps before. Knows nothing of rows, tokens and estimates, and reads no clock.
"""

import numpy as np
from numpy.typing import NDArray

from treering.history.budget import Rest, seconds_of
from treering.history.costs import VerifyCosts

Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]

_LEAST_WITH_COSTS = 0.02
_RISE = 0.0036
_FIRST_CUTOFF = 0.1
_NO_CURVE = np.zeros(0, np.int64), np.zeros(0)


class Spending:
    """What a step's drafts may be, and whether it makes any.

    Attributes:
        costs: of passes; None where they are not known.
        curve: sizes int64 [K] and seconds float64 [K] of the costs; K is 0 where they are not known.

    Example: with a least acceptance of 0.018 and no costs, `leasts` is (0.018, 0.0036), and every step drafts. With
    costs it is (0.05, 0.0) at first, and (0.02, 0.0) once steps have taken nothing out.
    """

    def __init__(self, min_acceptance: float) -> None:
        """By a least acceptance, as long as nothing is known of costs."""
        self._min_acceptance = min_acceptance
        self.use_costs(None)

    def use_costs(self, costs: VerifyCosts | None) -> None:
        """Goes by costs from now on, None for by acceptance; whether drafts pay is found out anew."""
        self.costs = costs
        self.curve: tuple[Int64Array, Float64Array] = _NO_CURVE if costs is None else (costs.num_tokens, costs.seconds)
        self._rest = Rest()
        self._cutoff = _FIRST_CUTOFF

    def is_due(self) -> bool:
        """Whether this step makes drafts; counts the step."""
        return self.costs is None or self._rest.is_due()

    @property
    def leasts(self) -> tuple[float, float]:
        """Below the first nothing is looked at, and by the second it rises along a draft; see `tree.least_behind`.

        With costs it is somewhat below what paid in the steps before, and the costs say what longer drafts cost.
        """
        if self.costs is None:
            return self._min_acceptance, _RISE
        return max(_LEAST_WITH_COSTS, 0.5 * self._cutoff), 0.0

    def note_drafts(self, num_rows: int, num_drafted: int, cutoff: float) -> None:
        """What a step drafted, and the least probability that paid, 0 where that is not known: then more is looked at.

        Where nothing was drafted, the next steps need not look.
        """
        self._cutoff = 0.5 * (self._cutoff + cutoff)
        if num_drafted == 0 and self.costs is not None:
            self._rest.note_nothing(num_rows, seconds_of(num_rows, *self.curve))

    def note_accepted(self, num_rows: int, num_drafted: int, num_accepted: int) -> None:
        """What became of a step's drafts: where they lose, some steps make none."""
        if self.costs is None:
            return
        plain, drafted = seconds_of(num_rows, *self.curve), seconds_of(num_rows + num_drafted, *self.curve)
        self._rest.note(num_rows, num_drafted, num_accepted, plain, drafted)
