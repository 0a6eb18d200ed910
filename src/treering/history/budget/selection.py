"""Which drafted tokens a step verifies: those whose expected gain exceeds their cost.

A step gives each of B rows one token in any case, and one more for each accepted draft token. It is best to take the
tokens of the batch with the greatest probability, as many as maximise expected tokens per second. A token is never
likelier than its parent, so the tokens that are kept form a tree.

    K entries of the costs   Z bins
"""

import math

import numpy as np

from treering.arrays import Float64Array, Int64Array
from treering.compiling.lean import lean
from treering.compiling.once import compiled_once
from treering.history.budget.costs import DraftPrices

NUM_BINS = 64
_BINS_PER_E = 14.0
_LONGEST = 256
_LONGER = 4
_LONGEST_BEFORE = 4
"""Cap on resumed rests: history may have grown since."""
_MOST_LOST, _MOST_LOST_FOR_NEWS = 0.005, 0.02


@lean
def bin_of(probability: float) -> int:
    """The bin of a probability: 0 for certain tokens, the last below 1 in 90; a bin is 7 % of probability wide."""
    return min(int(-math.log(max(probability, 1e-9)) * _BINS_PER_E), NUM_BINS - 1)


@compiled_once(error_model="numpy")
def seconds_of(num_tokens: float, sizes: Int64Array, seconds: Float64Array) -> float:
    """Seconds of a pass over that many tokens: linear between the entries, with the last slope beyond.

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
    """How many bins of drafted tokens pay, likeliest first.

    Args:
        num_rows: B.
        counts: float64 [Z], drafted tokens.
        gains: float64 [Z], sums of their probabilities, times their rows' worth.
        sizes: int64 [K] tokens of a pass.
        seconds: float64 [K].

    Example: one row, costs of 1 s for 1 token and 0.1 s for each further one, and tokens of probability 0.9 and 0.05:
    (1 + 0.9) / 1.1 = 1.73 tokens a second beat 1 / 1 and (1 + 0.95) / 1.2 = 1.63, so the first one is taken.
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
    steps make none, until a step with drafts wins again. A rest takes at most 256 steps, and at most as many as make
    the loss half a percent of them. A win only divides the next rest by 4, as losing drafts win some steps by chance.
    Looking for drafts costs time too: if it finds none that pay, the next 1, 4, 16, ... steps do not look, as many as
    make the cost half a percent of them; there is no rest if a step takes longer than 200 looks. Drafting is counted at
    its prices, so no decision depends on a clock.

    Example: a batch of 8 rows at 0.6 ms a step that takes 0.9 ms with drafts and accepts nothing rests for 1, 4, 16,
    64, 148, 148, ... steps. If it finds nothing, it looks again after 1, 4, 16, 30, 30, ... steps by the default
    prices: 90 us are half a percent of 30 steps.
    """

    def __init__(self, prices: DraftPrices | None = None, lengths: Int64Array | None = None) -> None:
        """Starts by drafting.

        Args:
            prices: of drafting; None for the defaults.
            lengths: int64 [2], resumed from and changed in place: steps of the latest rest after losing drafts, and
                after finding nothing; 0 if the latest drafts paid. With these, a loss rests for up to 16 steps at once.
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
        """Whether this step drafts; counts the step."""
        if self._num_left == 0:
            return True
        self._num_left -= 1
        return False

    def note_news(self) -> None:
        """Shortens the present rest because history has grown: the loss may be two percent of it instead of half a one.

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
        """Takes the outcome of a step with drafts.

        Args:
            num_rows: of the step.
            num_drafted: tokens that it verified.
            num_accepted: of these.
            seconds_plain: of its pass without drafts.
            seconds_drafted: of its pass.
            num_grown: tokens considered for its drafts; None for `num_drafted`.
        """
        length = int(self._lengths[0])
        keep = 0.9 if length == 0 else 0.5
        drafting = self._prices.of_drafting(num_rows, num_drafted if num_grown is None else num_grown, num_drafted)
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
        """Takes a step that found nothing that pays: its rows, seconds of its pass, and tokens considered."""
        lost = self._prices.of_looking(num_rows, num_grown) / seconds_plain
        self._begin(_next(int(self._lengths[1]), lost), lost)
        self._lengths[1] = self._num_left

    def _begin(self, length: int, lost: float) -> None:
        self._num_left = length
        self._num_spared = max(0, length - max(1, int(lost / _MOST_LOST_FOR_NEWS)))


def _next(length: int, lost: float) -> int:
    """The length of the rest after one of `length`, for a loss in steps without drafts."""
    return min(max(1, _LONGER * length), _LONGEST, int(lost / _MOST_LOST))
