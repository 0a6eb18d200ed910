"""How much a drafter drafts, from a minimum acceptance or from the costs of passes and drafting.

Reads no clock.

    B rows   J entries from B tokens on
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import Float64Array, Int64Array
from treering.history.budget.costs import VerifyCosts
from treering.history.budget.selection import Backoff, seconds_of


class StepCosts(NamedTuple):
    """Seconds of the passes of a step with B rows, the prices of its drafted tokens included."""

    sizes: Int64Array  # [J] tokens of the pass, from B on
    seconds: Float64Array  # [J]
    per_token: float  # the least that one token more takes


def step_costs(costs: VerifyCosts, num_rows: int) -> StepCosts:
    """The costs of passes from B tokens on, with the price of each drafted token but without looking for drafts.

    Example: passes of 1 and 8 tokens in 1.0 and 2.4 ms, and a price of 0.1 ms per drafted token, give for two rows
    sizes [2, 8] with 1.2 and 2.4 + 0.6 ms, and 0.3 ms per further token.
    """
    beyond = costs.num_tokens[costs.num_tokens > num_rows]
    sizes = np.concatenate([[num_rows], beyond if beyond.size else [num_rows + 1]]).astype(np.int64)
    passes = np.array([seconds_of(float(size), costs.num_tokens, costs.seconds) for size in sizes])
    seconds = passes + costs.prices.drafted * (sizes - num_rows)
    return StepCosts(sizes, seconds, float((np.diff(seconds) / np.diff(sizes)).min()))


_LEAST_WITH_COSTS = 0.02
_RISE = 0.0036
_FIRST_CUTOFF = 0.1
_TOKEN_S = 75e-6
"""Seconds of a token without drafts if costs are unknown."""
_NO_CURVE = np.zeros(0, np.int64), np.zeros(0)


class DraftController:
    """Decides whether a step drafts, and how likely its draft tokens must be.

    Attributes:
        costs: of passes and drafting; None if unknown.
        curve: tokens int64 [J] of a pass over the present rows, and seconds float64 [J] of its step; J is 0 if costs
            are unknown.

    Example: with a minimum acceptance of 0.018 and no costs, `leasts` is (0.018, 0.0036), and every step drafts. With
    costs it is (0.05, 0.0) at first, and (0.02, 0.0) once steps have dropped nothing, if further tokens are cheap. For
    8 rows whose pass takes 1 ms plus 50 us for each further token, it is never below 0.4: at 8 tokens a millisecond,
    0.4 tokens take 50 us.
    """

    def __init__(self, min_acceptance: float, rests: Int64Array | None = None) -> None:
        """Uses a minimum acceptance until costs are known; `rests` are the lengths of a `Backoff`."""
        self._min_acceptance, self._rests = min_acceptance, rests
        self._num_rows = self._num_duplicates = 0
        self.use_costs(None)

    def use_costs(self, costs: VerifyCosts | None) -> None:
        """Uses these costs from now on, or the minimum acceptance for None; forgets whether drafts pay."""
        self.costs = costs
        self._rest = Backoff(None if costs is None else costs.prices, self._rests)
        self._cutoff, self._num_grown, self._grown = _FIRST_CUTOFF, 0, 0.0
        self._by_rows: dict[int, StepCosts] = {}
        self.use_rows(self._num_rows, self._num_duplicates)

    def use_rows(self, num_rows: int, num_duplicates: int) -> None:
        """Sets the rows that lead, and those that are verified with the draft of one, for the steps from now on."""
        self._num_rows, self._num_duplicates = num_rows, num_duplicates
        self.curve: tuple[Int64Array, Float64Array] = _NO_CURVE
        self._floor = 0.0
        if self.costs is None or num_rows == 0:
            return
        if num_rows not in self._by_rows:
            self._by_rows[num_rows] = step_costs(self.costs, num_rows)
        sizes, seconds, per_token = self._by_rows[num_rows]
        prices = self.costs.prices
        seconds = seconds + prices.of_looking(num_rows, self._grown)
        self.curve = sizes, seconds
        # Drafting is never slower than not drafting, and at that speed a less likely token loses time (`choose_bins`).
        # However duplicates are spread, a token of a draft counts for one row and all of them at most.
        self._floor = num_rows / seconds[0] * (per_token + prices.grown) / (1 + num_duplicates)

    def is_due(self) -> bool:
        """Whether this step drafts; counts the step."""
        return self.costs is None or self._rest.is_due()

    def note_news(self) -> None:
        """Call after history has grown; see `Backoff.note_news`."""
        self._rest.note_news()

    @property
    def leasts(self) -> tuple[float, float]:
        """The least probability of a draft token, and its rise along a draft; see `tree.least_after`.

        With costs, the first is somewhat below what paid in earlier steps, but not too low to pay, and the second is 0,
        as the costs already price longer drafts.
        """
        if self.costs is None:
            return self._min_acceptance, _RISE
        return min(max(_LEAST_WITH_COSTS, 0.5 * self._cutoff, self._floor), 1.0), 0.0

    def note_drafts(self, num_rows: int, num_drafted: int, cutoff: float, num_grown: int) -> None:
        """Takes what a step drafted; after a step without drafts, the next ones may not look for any.

        Args:
            num_rows: of the step.
            num_drafted: tokens.
            cutoff: the lowest probability that paid, 0 if unknown: then less likely tokens are considered.
            num_grown: tokens that were likely enough to be considered, drafted or not.
        """
        self._cutoff = 0.5 * (self._cutoff + cutoff)
        self._num_grown, self._grown = num_grown, 0.5 * (self._grown + num_grown)
        if num_drafted == 0 and self.costs is not None:
            self._rest.note_nothing(num_rows, self._seconds_of(num_rows), num_grown)

    def note_accepted(self, num_rows: int, num_drafted: int, num_accepted: float) -> None:
        """Takes the outcome of the latest drafts; if they lose time, some steps make none."""
        if self.costs is None:
            return
        plain, drafted = self._seconds_of(num_rows), self._seconds_of(num_rows + num_drafted)
        self._rest.note(num_rows, num_drafted, num_accepted, plain, drafted, self._num_grown)

    def token_s(self, num_rows: int) -> float:
        """Seconds of a token without drafts: a row's share of a pass, or 75 us if costs are unknown."""
        return _TOKEN_S if self.costs is None else self._seconds_of(num_rows) / num_rows

    def _seconds_of(self, num_tokens: int) -> float:
        assert self.costs is not None
        seconds: float = seconds_of(float(num_tokens), self.costs.num_tokens, self.costs.seconds)
        return seconds
