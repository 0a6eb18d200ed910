"""Detects measured costs that no longer hold: passes that take less than half of them.

Then something slowed the measurement down. Slower passes are no sign of drift: contexts grow, and other programs use
the processors for a while.
"""

from treering.history.budget.costs import VerifyCosts
from treering.history.budget.selection import seconds_of

_FIRST_WINDOW = 64
_LONGER = 4
"""Growth factor of the window after each new measurement, which costs time too."""
_FAST = 0.5
"""Fraction of the measured seconds below which a pass counts as fast."""
_MOST_FAST = 0.5
"""Fraction of a window's passes that may be fast: single passes are fast by accident."""


class CostDrift:
    """Counts, per window, the passes that are much faster than measured.

    Example: passes over 8 tokens were measured at 220 ms, while another program used the processors, and take 0.4 ms.
    After 64 of them the costs no longer hold. After the next measurement the window has 256 passes.
    """

    def __init__(self) -> None:
        """Starts without costs; `note` returns False until `begin`."""
        self._costs: VerifyCosts | None = None
        self._window = _FIRST_WINDOW
        self._num_passes = self._num_fast = 0

    def begin(self, costs: VerifyCosts) -> None:
        """Starts watching newly measured costs."""
        self._costs = costs
        self._num_passes = self._num_fast = 0

    def note(self, num_tokens: int, seconds: float) -> bool:
        """Records a pass; returns whether to measure the costs again. Then ignores passes until `begin`.

        Args:
            num_tokens: of the pass.
            seconds: of the pass, sampling included, as in the costs.
        """
        if self._costs is None:
            return False
        self._num_passes += 1
        self._num_fast += seconds < _FAST * seconds_of(num_tokens, self._costs.num_tokens, self._costs.seconds)
        if self._num_passes < self._window:
            return False
        is_over = self._num_fast > _MOST_FAST * self._num_passes
        self._num_passes = self._num_fast = 0
        if is_over:
            self._costs = None
            self._window *= _LONGER
        return is_over
