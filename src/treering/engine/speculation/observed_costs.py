"""Decides step by step whether to draft, from the times of real steps, and never loses more than a set share of them.

Nothing is measured beside the run: steps without drafts tell what they take, and a few steps with drafts at a time tell
whether drafts pay at that number of rows. Results do not depend on any of it (law 5).

    B rows
"""

from dataclasses import dataclass

from treering.arrays import BoolArray, Int64Array
from treering.errors import ConfigError
from treering.history.budget.costs import VerifyCosts
from treering.history.budget.pass_times import PassTimes

LOAD_S = 0.3
"""Seconds that the first drafts of a process take beyond their own: the compiled drafter is loaded. 0.26 were measured
on two slow cores."""
COMPILE_S = 20.0
"""Seconds that they take once after an installation: the drafter is compiled. 10 to 15 were measured there."""
_NUM_TRIED = 4
"""Steps with drafts after which their gain counts."""
_KEPT = 0.8
"""Share of a gain that a new step leaves."""
_FIRST_REST, _LONGER, _LONGEST_REST = 32, 4, 4096
"""Steps without drafts after losing ones; each loss in a row makes the rest longer."""
_PLAIN_EVERY = 48
"""While drafts pay, one of so many steps makes none, so that its time stays known."""
_MOST_SAVED = 2.0
"""Savings that may be lost again later, in shares of the budget."""


@dataclass(slots=True, kw_only=True)
class _Gain:
    """How drafts did at about one number of rows: seconds that their tokens would have taken, over seconds taken."""

    num_asked: int = 0
    num_steps: int = 0
    expected_s: float = 0.0
    spent_s: float = 0.0
    rest: int = _FIRST_REST
    num_left: int = 0

    @property
    def pays(self) -> bool:
        return self.expected_s >= self.spent_s


class ObservedCosts:
    """Costs and gains of drafts, from an engine's own steps.

    Args:
        max_loss: share of the time of all steps that drafts may cost without paying back, in [0, 1].
        load_s: seconds that the first drafts take beyond their own, such as `COMPILE_S`.

    Raises:
        ConfigError: another share.

    Example: with max_loss=0.02, steps that took 30 s so far, and nothing drafted yet, drafts may lose 0.6 s: enough to
    load the drafter and try a few steps. If these are slower, the next 32 such steps make none, then 128, 512, ...
    """

    def __init__(self, *, max_loss: float = 0.025, load_s: float = LOAD_S) -> None:
        """Starts without times; the first steps make no drafts."""
        if not isinstance(max_loss, int | float) or not 0 <= max_loss <= 1:
            raise ConfigError(f"max_loss is a share of the time in [0, 1], got {max_loss!r}; 0.025 allows 2.5 %")
        self.horizon_s = 0.0
        """Seconds that all steps of the run will take as far as known; a budget is a share of the larger of this and
        of what they took."""
        self.total_s = 0.0
        """Seconds of all steps."""
        self.saved_s = 0.0
        """Seconds that drafts saved; negative if they lost."""
        self._max_loss, self._load_s = max_loss, load_s
        self._steps, self._passes = PassTimes(), PassTimes()
        self._gains: dict[int, _Gain] = {}
        self._num_drafted_steps = 0

    @property
    def budget_s(self) -> float:
        """Seconds that drafts may lose from here on."""
        allowed = self._max_loss * max(self.horizon_s, self.total_s)
        return allowed + min(self.saved_s, _MOST_SAVED * allowed)

    def can_spend(self, seconds: float) -> bool:
        """Whether drafts may cost so many seconds, and loading the drafter if nothing was drafted yet."""
        return seconds + (0.0 if self._num_drafted_steps else self._load_s) <= self.budget_s

    def is_promising(self) -> bool:
        """Whether drafts pay at some number of rows, or have yet to be tried at one."""
        gains = self._gains.values()
        return not gains or any(gain.num_steps < _NUM_TRIED or gain.pays or gain.num_left == 0 for gain in gains)

    def note_overhead(self, seconds: float) -> None:
        """Takes time spent for drafts outside steps, such as on history."""
        self.total_s += seconds
        self.saved_s -= seconds

    def may_draft(self, num_rows: int) -> bool:
        """Whether this step looks for drafts."""
        if not self._steps.knows(num_rows):
            return False
        gain = self._gains.setdefault(num_rows.bit_length(), _Gain())
        if gain.num_left > 0:
            return False
        gain.num_asked += 1
        if gain.num_steps >= _NUM_TRIED and gain.pays:
            return gain.num_asked % _PLAIN_EVERY > 0
        return self.can_spend(self._steps.seconds_of(num_rows))

    def note_step(
        self, num_new: Int64Array, is_finished: BoolArray, *, num_waiting: int, drafted: bool, seconds: float
    ) -> None:
        """Takes the outcome of a step without prefill.

        Args:
            num_new: int64 [B], tokens that each row gained.
            is_finished: bool [B], rows that ended.
            num_waiting: requests without a row.
            drafted: whether the step looked for drafts.
            seconds: of the whole step, drafting included.
        """
        self.total_s += seconds
        num_rows = num_new.size
        if not drafted:
            self._steps.note(num_rows, seconds)
            gain = self._gains.get(num_rows.bit_length())
            if gain is not None:
                gain.num_left = max(0, gain.num_left - 1)
            return
        expected_s = self._plain_s(num_new, is_finished, num_waiting)
        self.saved_s += expected_s - seconds
        self._num_drafted_steps += 1
        if self._num_drafted_steps <= 2:
            # Loading the drafter says nothing about the steps to come.
            return
        self._update(self._gains.setdefault(num_rows.bit_length(), _Gain()), expected_s, seconds)

    def note_pass(self, num_tokens: int, seconds: float) -> None:
        """Takes the time of a pass without prefill."""
        self._passes.note(num_tokens, seconds)

    def new_costs(self) -> VerifyCosts | None:
        """Costs of passes for the drafter, where it has none or enough passes were timed since; else None."""
        return self._passes.new_costs()

    def _plain_s(self, num_new: Int64Array, is_finished: BoolArray, num_waiting: int) -> float:
        """Seconds that the step's tokens would have taken without drafts, at least.

        If requests wait, each finished row is replaced, and a token takes its share of a step. Otherwise the last row
        decides how many steps there are: they become fewer by the progress of the slowest row only, and each further
        token only makes a step narrower.
        """
        num_rows, num_sampled = num_new.size, int(num_new.sum())
        whole_s = self._steps.seconds_of(num_rows)
        if num_waiting > 0:
            return num_sampled * whole_s / num_rows
        num_steps = int(num_new.max() if is_finished.all() else num_new[~is_finished].min())
        per_row = (whole_s - self._steps.seconds_of(1)) / (num_rows - 1) if num_rows > 1 else 0.0
        alone = self._steps.seconds_of(1) - per_row
        return num_steps * alone + num_sampled * per_row

    def _update(self, gain: _Gain, expected_s: float, seconds: float) -> None:
        gain.num_steps += 1
        gain.expected_s = _KEPT * gain.expected_s + expected_s
        gain.spent_s = _KEPT * gain.spent_s + seconds
        if gain.num_steps < _NUM_TRIED:
            return
        if gain.pays:
            gain.rest = _FIRST_REST
            return
        gain.num_left, gain.rest = gain.rest, min(_LONGER * gain.rest, _LONGEST_REST)
