"""Whether measured costs still hold: where passes take less than half of them, something slowed the measurement down.

Knows numbers of tokens, seconds and costs. Knows no clock, and nothing of what a pass computes. What takes longer than
measured is no sign: contexts grow, and others take the processors for a while.
"""

from treering.history.budget.costs import VerifyCosts
from treering.history.budget.selection import seconds_of

_FIRST_WINDOW = 64
_LONGER = 4
"""Each window is so many times as long as the one before, once costs were measured again: that takes its time, too."""
_FAST = 0.5
"""Of measured seconds: a pass that takes less is not the one that was measured."""
_MOST_FAST = 0.5
"""Of a window's passes: a single one may be fast by accident."""


class CostDrift:
    """Counts the passes that are much faster than their costs say, window by window.

    Example: passes over 8 tokens were measured at 220 ms, while another program had the processors, and take 0.4 ms.
    Behind 64 of them the costs no longer hold. Behind the next measurement the first window has 256 passes.
    """

    def __init__(self) -> None:
        """Without costs, of which nothing is said."""
        self._costs: VerifyCosts | None = None
        self._window = _FIRST_WINDOW
        self._num_passes = self._num_fast = 0

    def begin(self, costs: VerifyCosts) -> None:
        """Takes costs that were measured now."""
        self._costs = costs
        self._num_passes = self._num_fast = 0

    def note(self, num_tokens: int, seconds: float) -> bool:
        """Whether the costs are to be measured again, after one more pass; nothing is noted then until they are.

        Args:
            num_tokens: of the pass.
            seconds: that it took, drawing included, as costs have it.
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
