"""Decide how much to draft: what passes and drafting cost, which drafted tokens pay, and when drafting rests.

A step gives each of B rows one token in any case, and one more for each accepted draft token. The best choice takes the
likeliest draft tokens of the batch, in the number that maximises expected tokens per second. A token is never likelier
than its parent, so the chosen tokens form a tree. No decision reads a clock.

    B rows   K entries of the costs   J entries from B tokens on   Z bins
"""

import math
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.arrays import Float64Array, Int64Array
from treering.compiling.lean import lean
from treering.compiling.once import compiled_once
from treering.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPrices:
    """Seconds that a step spends on drafts in addition to its pass, all finite and >= 0.

    The defaults were measured after passes of a small model on slow cores, where a pass fills the caches with weights.

    Attributes:
        look: per step that looks for drafts, whether it finds any or not.
        row: per row of such a step.
        grown: per token that is likely enough to be considered, drafted or not.
        learn: per step with drafts, for learning from their outcome.
        drafted: per drafted token, in addition to its share of the pass.

    Raises:
        InputError: a price is negative or not finite.

    Example: with the defaults, 8 rows with 60 tokens grown, 40 of them drafted, take 90 us + 60 us to look and
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
            raise InputError(f"prices must be seconds, finite and >= 0, got {prices}; correct them or use the defaults")

    def of_looking(self, num_rows: int, num_grown: float = 0.0) -> float:
        """Return the seconds of looking for drafts, with `num_grown` tokens grown."""
        return self.look + self.row * num_rows + self.grown * num_grown


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyCosts:
    """Seconds of a pass by its tokens, linear between entries and with the last slope beyond; and draft prices.

    Attributes:
        num_tokens: int64 [K], K >= 1, >= 1 and ascending; lists become arrays.
        seconds: float64 [K], > 0, finite and never falling.
        prices: prices of drafting.

    Raises:
        InputError: a column breaks these rules.

    Example: num_tokens [1, 8] and seconds [0.001, 0.0024] mean 0.2 ms per further token.
    """

    num_tokens: NDArray[np.int64]
    seconds: NDArray[np.float64]
    prices: DraftPrices = DraftPrices()

    def __post_init__(self) -> None:
        sizes, seconds = _as_numbers(self.num_tokens, "iu"), _as_numbers(self.seconds, "iuf")
        if not isinstance(self.prices, DraftPrices):
            raise InputError(
                f"prices of drafting must be a DraftPrices, got {self.prices!r}; leave them out for the defaults"
            )
        if sizes.ndim != 1 or sizes.shape != seconds.shape or sizes.size == 0:
            raise InputError(
                f"costs must have one entry of seconds per entry of num_tokens, got shapes {sizes.shape} and "
                f"{seconds.shape}; pair them, with at least one entry"
            )
        rises = (np.diff(sizes) > 0).all() and (np.diff(seconds) >= 0).all()
        if not (sizes[0] >= 1 and seconds[0] > 0 and rises and np.isfinite(seconds).all()):
            raise InputError(
                f"num_tokens must be ascending and >= 1, and seconds > 0, finite and never falling, got "
                f"{sizes.tolist()} and {seconds.tolist()}; sort and smooth them"
            )
        object.__setattr__(self, "num_tokens", sizes.astype(np.int64))
        object.__setattr__(self, "seconds", seconds.astype(np.float64))


def _as_numbers(values: object, kinds: str) -> NDArray[Any]:
    try:
        column = np.asarray(values)
    except ValueError as error:
        raise InputError(f"a column of costs must have one number per entry, got {values!r}; flatten it") from error
    if column.dtype.kind not in kinds:
        raise InputError(f"num_tokens must be integers and seconds numbers, got {values!r}; correct them")
    return column


NUM_BINS = 64
_BINS_PER_E = 14.0
_LONGEST = 256
_LONGER = 4
_LONGEST_BEFORE = 4
"""Longest rest to resume from, because history may have grown since."""
_MOST_LOST, _MOST_LOST_FOR_NEWS = 0.005, 0.02


@lean
def bin_of(probability: float) -> int:
    """Return the bin of a probability: 0 for certain tokens, the last below 1 in 90; a bin is 7 % wide."""
    return min(int(-math.log(max(probability, 1e-9)) * _BINS_PER_E), NUM_BINS - 1)


@compiled_once(error_model="numpy")
def seconds_of(num_tokens: float, sizes: Int64Array, seconds: Float64Array) -> float:
    """Return the seconds of a pass over `num_tokens` tokens: linear between the entries, with the last slope beyond.

    Example: sizes [1, 8] with seconds [1.0, 2.4] give 1.2 for 2 tokens and 2.8 for 10.
    """
    last = sizes.size - 1
    if last == 0 or num_tokens <= sizes[0]:
        return float(seconds[0])
    k = 1
    while k < last and sizes[k] < num_tokens:
        k += 1
    slope = (seconds[k] - seconds[k - 1]) / (sizes[k] - sizes[k - 1])
    return float(seconds[k - 1] + slope * (num_tokens - sizes[k - 1]))


@lean
def choose_bins(
    num_rows: int, counts: Float64Array, gains: Float64Array, sizes: Int64Array, seconds: Float64Array
) -> int:
    """Return how many bins of drafted tokens pay, likeliest first.

    Args:
        num_rows: B.
        counts: float64 [Z], drafted tokens per bin.
        gains: float64 [Z], sums of their probabilities, times their rows' worth.
        sizes: int64 [K], tokens of a pass.
        seconds: float64 [K].

    Example: one row, costs of 1 s for 1 token and 0.1 s for each further one, and tokens of probability 0.9 and 0.05:
    (1 + 0.9) / 1.1 = 1.73 tokens a second beat 1 / 1 and (1 + 0.95) / 1.2 = 1.63, so one bin pays.
    """
    best_bins, tokens, gain = 0, float(num_rows), float(num_rows)
    best_speed = gain / seconds_of(tokens, sizes, seconds)
    for k in range(NUM_BINS):
        if counts[k] == 0:
            continue
        tokens += counts[k]
        gain += gains[k]
        speed = gain / seconds_of(tokens, sizes, seconds)
        if speed > best_speed:
            best_bins, best_speed = k + 1, speed
    return best_bins


class Backoff:
    """Decides whether drafting as a whole pays, and pauses it for some steps (a rest) if it does not.

    Speeds with and without drafts are compared over about ten steps. If drafts lose, the next 1, then 4, then 16, ...
    steps make none, until a step with drafts wins again. A rest is at most 256 steps long, and at most so long that the
    loss is half a percent of it. A win only divides the next rest by 4, because losing drafts win some steps by chance.
    Looking for drafts costs time too: if it finds none that pay, the next 1, 4, 16, ... steps do not look, until the
    cost is half a percent of them. A step that takes longer than 200 looks is followed by no rest. Drafting is counted
    at its prices, so no decision depends on a clock.

    Example: a batch of 8 rows at 0.6 ms a step that takes 0.9 ms with drafts and accepts nothing rests for 1, 4, 16,
    64, 148, 148, ... steps. If it finds nothing, it looks again after 1, 4, 16, 30, 30, ... steps with the default
    prices: 90 us are half a percent of 30 steps.
    """

    def __init__(self, prices: DraftPrices | None = None, lengths: Int64Array | None = None) -> None:
        """Start by drafting.

        Args:
            prices: prices of drafting; None for the defaults.
            lengths: int64 [2], resumed from and changed in place: steps of the latest rest after losing drafts, and
                after finding nothing; 0 if the latest drafts paid. With it, a loss rests for up to 16 steps at once.
                None starts from 0.
        """
        self._prices = DraftPrices() if prices is None else prices
        self._lengths = np.zeros(2, np.int64) if lengths is None else lengths
        np.minimum(self._lengths, _LONGEST_BEFORE, out=self._lengths)
        self._seconds_plain = 0.0
        self._seconds_drafted = 0.0
        self._num_plain = 0.0
        self._num_drafted = 0.0
        self._num_left = 0
        self._num_spared = 0

    def is_due(self) -> bool:
        """Return whether this step drafts; call it once per step."""
        if self._num_left == 0:
            return True
        self._num_left -= 1
        return False

    def note_news(self) -> None:
        """Shorten the present rest because history has grown: the loss may then be 2 % of it instead of 0.5 %.

        Example: a loss of 0.32 steps is followed by a rest of 64 steps, or of 16 if history grows. If it grows after 20
        of the 64, the next step looks.
        """
        self._num_left = max(0, self._num_left - self._num_spared)
        self._num_spared = 0

    def note(
        self,
        num_rows: int,
        num_drafted: int,
        num_accepted: float,
        seconds_plain: float,
        seconds_drafted: float,
        num_grown: int | None = None,
    ) -> None:
        """Count the outcome of a step with drafts.

        Args:
            num_rows: rows of the step.
            num_drafted: draft tokens that it verified.
            num_accepted: draft tokens that were accepted.
            seconds_plain: seconds of its pass without drafts.
            seconds_drafted: seconds of its pass with them.
            num_grown: tokens considered for its drafts; None for `num_drafted`.
        """
        length = int(self._lengths[0])
        keep = 0.9 if length == 0 else 0.5
        looking = self._prices.of_looking(num_rows, num_drafted if num_grown is None else num_grown)
        drafting = looking + self._prices.learn + self._prices.drafted * num_drafted
        self._num_plain = keep * self._num_plain + num_rows
        self._num_drafted = keep * self._num_drafted + num_rows + num_accepted
        self._seconds_plain = keep * self._seconds_plain + seconds_plain
        self._seconds_drafted = keep * self._seconds_drafted + seconds_drafted + drafting
        lost = self._seconds_drafted / self._seconds_plain - self._num_drafted / self._num_plain
        if lost <= 0:
            self._lengths[:] = length // _LONGER, 0
            return
        self._begin(max(1, _next(length, lost)), lost)
        self._lengths[:] = self._num_left, 0

    def note_nothing(self, num_rows: int, seconds_plain: float, num_grown: int = 0) -> None:
        """Count a step that found nothing that pays: its rows, seconds of its pass, and tokens considered."""
        lost = self._prices.of_looking(num_rows, num_grown) / seconds_plain
        self._begin(_next(int(self._lengths[1]), lost), lost)
        self._lengths[1] = self._num_left

    def _begin(self, length: int, lost: float) -> None:
        self._num_left = length
        self._num_spared = max(0, length - max(1, int(lost / _MOST_LOST_FOR_NEWS)))


def _next(length: int, lost: float) -> int:
    """Return the length of the rest after one of `length`, for a loss in steps without drafts."""
    return min(max(1, _LONGER * length), _LONGEST, int(lost / _MOST_LOST))


_PER_OCTAVE = 4
"""Sizes this close, as shares of a factor of two, count as one."""
_KEPT = 0.85
"""Share of an average that stays when a new time is added: about the last seven times count."""
_MOST_LONGER = 2.0
"""A time counts as at most this many times its average, because other load disturbs single passes."""
_SLOPE_WITHOUT_DATA = 0.7
"""Cost of one more token beyond the only known size, as a share of that size's seconds per token."""
_FIRST_REFRESH, _MORE = 16, 2
"""Passes until costs are updated for the first time, and the growth of that number."""


class PassTimes:
    """Average seconds of passes by their size: the costs of an engine that were not measured in advance.

    Example: passes of 8 tokens in 2.0 ms and of 16 in 2.8 ms give 2.4 ms for 12 and, beyond them, 4.4 ms for 32. After
    each pass, `costs = times.new_costs()`, and unless they are None `drafter.use_costs(costs)`.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._curve: VerifyCosts | None = None
        self._num_noted = self._next_refresh = 0

    def note(self, size: int, seconds: float) -> None:
        """Add the time of one pass of `size` tokens, without prefill."""
        key = round(_PER_OCTAVE * math.log2(size))
        if key not in self._seconds:
            self._sizes[key], self._seconds[key] = float(size), seconds
        else:
            average = self._seconds[key]
            self._seconds[key] = _KEPT * average + (1 - _KEPT) * min(seconds, _MOST_LONGER * average)
            self._sizes[key] = _KEPT * self._sizes[key] + (1 - _KEPT) * size
        self._curve = None
        self._num_noted += 1

    def knows(self, size: int) -> bool:
        """Return whether a pass within a factor of two of this size was timed."""
        key = _PER_OCTAVE * math.log2(size)
        return any(abs(known - key) <= _PER_OCTAVE for known in self._seconds)

    def seconds_of(self, size: int) -> float:
        """Return the expected seconds of a pass; needs at least one time."""
        curve = self.curve()
        seconds: float = seconds_of(size, curve.num_tokens, curve.seconds)
        return seconds

    def curve(self) -> VerifyCosts:
        """Return the averages as costs, with one entry beyond the largest size; needs at least one time."""
        if self._curve is None:
            keys = sorted(self._seconds)
            sizes = np.unique(np.maximum(1, np.round([self._sizes[key] for key in keys])).astype(np.int64))
            known = [self._sizes[key] for key in keys], [self._seconds[key] for key in keys]
            seconds = non_decreasing(np.interp(sizes, *known))
            last, most = int(sizes[-1]), float(seconds[-1])
            slope = _SLOPE_WITHOUT_DATA * most / last
            if sizes.size > 1:
                first = max(0, int(np.searchsorted(sizes, last / 2, side="right")) - 1)
                slope = (most - float(seconds[first])) / (last - int(sizes[first]))
            self._curve = VerifyCosts(
                num_tokens=np.append(sizes, 2 * last), seconds=np.append(seconds, most + slope * last)
            )
        return self._curve

    def new_costs(self) -> VerifyCosts | None:
        """Return the averages as costs if there were none before or enough passes were added since; else None.

        Costs are new after 1 pass, 17, 34, 68 and so on, because a drafter that takes new costs forgets whether drafts
        pay.
        """
        if self._num_noted < max(1, self._next_refresh):
            return None
        self._next_refresh = max(self._num_noted + _FIRST_REFRESH, _MORE * self._num_noted)
        return self.curve()


def non_decreasing(seconds: Float64Array) -> Float64Array:
    """Make times non-decreasing: take the midpoint of the maximum up to each entry and the minimum from it on.

    Example: [1.0, 1.2, 1.0, 1.4] become [1.0, 1.1, 1.1, 1.4].
    """
    greatest = np.maximum.accumulate(seconds)
    least = np.minimum.accumulate(seconds[::-1])[::-1]
    return (greatest + least) / 2


class StepCosts(NamedTuple):
    """Seconds of the passes of a step with B rows, with the prices of its drafted tokens."""

    sizes: Int64Array  # [J] tokens of the pass, from B on
    seconds: Float64Array  # [J]
    per_token: float  # the least seconds that one more token takes


def step_costs(costs: VerifyCosts, num_rows: int) -> StepCosts:
    """Return the costs of passes from B tokens on, with the price of each drafted token but without looking.

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
        costs: costs of passes and drafting; None if unknown.
        curve: tokens int64 [J] of a pass over the present rows, and seconds float64 [J] of its step; J is 0 if costs
            are unknown.
        fixed: share of a pass over the present rows that does not depend on their number; 0 if costs are unknown.

    Example: with a minimum acceptance of 0.018 and no costs, `leasts` is (0.018, 0.0036), and every step drafts. With
    costs it is (0.05, 0.0) at first, and (0.02, 0.0) once steps have dropped nothing, if further tokens are cheap. For
    8 rows whose pass takes 1 ms plus 50 us for each further token, it is never below 0.4: at 8 tokens a millisecond,
    0.4 tokens take 50 us.
    """

    def __init__(self, min_acceptance: float, rests: Int64Array | None = None) -> None:
        """Use a minimum acceptance until costs are known; `rests` is the `lengths` of a `Backoff`."""
        self._min_acceptance, self._rests = min_acceptance, rests
        self._num_rows = self._num_duplicates = 0
        self.use_costs(None)

    def use_costs(self, costs: VerifyCosts | None) -> None:
        """Use these costs from now on, or the minimum acceptance for None; forget whether drafts pay."""
        self.costs = costs
        self._rest = Backoff(None if costs is None else costs.prices, self._rests)
        self._cutoff, self._num_grown, self._grown = _FIRST_CUTOFF, 0, 0.0
        self._by_rows: dict[int, StepCosts] = {}
        self.use_rows(self._num_rows, self._num_duplicates)

    def use_rows(self, num_rows: int, num_duplicates: int) -> None:
        """Set the numbers of leading rows, and of rows that share the draft of a leader, from now on."""
        self._num_rows, self._num_duplicates = num_rows, num_duplicates
        self.curve: tuple[Int64Array, Float64Array] = _NO_CURVE
        self._floor = self.fixed = 0.0
        if self.costs is None or num_rows == 0:
            return
        if num_rows not in self._by_rows:
            self._by_rows[num_rows] = step_costs(self.costs, num_rows)
        sizes, seconds, per_token = self._by_rows[num_rows]
        alone, whole = self._seconds_of(1), self._seconds_of(num_rows)
        # Passes up to B rows are taken as a straight line.
        self.fixed = max(0.0, (num_rows * alone - whole) / ((num_rows - 1) * whole)) if num_rows > 1 else 0.0
        prices = self.costs.prices
        seconds = seconds + prices.of_looking(num_rows, self._grown)
        self.curve = sizes, seconds
        # Drafting is never slower than not drafting, and at that speed a less likely token loses time (`choose_bins`).
        # A draft token counts for its row and at most all duplicates, however they are spread.
        self._floor = num_rows / seconds[0] * (per_token + prices.grown) / (1 + num_duplicates)

    def is_due(self) -> bool:
        """Return whether this step drafts; call it once per step."""
        return self.costs is None or self._rest.is_due()

    def note_news(self) -> None:
        """Note that history has grown; see `Backoff.note_news`."""
        self._rest.note_news()

    @property
    def leasts(self) -> tuple[float, float]:
        """Least probability of a draft token, and its rise along a draft; see `tree.least_after`.

        With costs, the first is somewhat below what paid in earlier steps, but not too low to pay, and the second is 0,
        because the costs already price longer drafts.
        """
        if self.costs is None:
            return self._min_acceptance, _RISE
        return min(max(_LEAST_WITH_COSTS, 0.5 * self._cutoff, self._floor), 1.0), 0.0

    def note_drafts(self, num_rows: int, num_drafted: int, cutoff: float, num_grown: int) -> None:
        """Count what a step drafted; after a step without drafts, the next ones may not look for any.

        Args:
            num_rows: rows of the step.
            num_drafted: drafted tokens.
            cutoff: the lowest probability that paid; 0 if unknown, so that less likely tokens are considered.
            num_grown: tokens that were likely enough to be considered, drafted or not.
        """
        self._cutoff = 0.5 * (self._cutoff + cutoff)
        self._num_grown, self._grown = num_grown, 0.5 * (self._grown + num_grown)
        if num_drafted == 0 and self.costs is not None:
            self._rest.note_nothing(num_rows, self._seconds_of(num_rows), num_grown)

    def note_accepted(self, num_rows: int, num_drafted: int, num_accepted: float) -> None:
        """Count the outcome of the latest drafts; if they lose time, some steps make none."""
        if self.costs is None:
            return
        plain, drafted = self._seconds_of(num_rows), self._seconds_of(num_rows + num_drafted)
        self._rest.note(num_rows, num_drafted, num_accepted, plain, drafted, self._num_grown)

    def token_s(self, num_rows: int) -> float:
        """Return the seconds of a token without drafts: a row's share of a pass, or 75 us if costs are unknown."""
        return _TOKEN_S if self.costs is None else self._seconds_of(num_rows) / num_rows

    def _seconds_of(self, num_tokens: int) -> float:
        assert self.costs is not None
        seconds: float = seconds_of(float(num_tokens), self.costs.num_tokens, self.costs.seconds)
        return seconds
