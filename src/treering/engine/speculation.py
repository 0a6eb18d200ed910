"""Run speculative decoding: ask the drafter for drafts, report which were accepted, and learn the costs of passes.

Costs are measured on artificial rows before the first pass (`measure`), or learnt from the run's own steps
(`ObservedCosts`). Results depend on neither (law 5).

    B rows   T tokens of a pass
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from treering.arrays import BoolArray, Int64Array
from treering.engine.batch.rows import Table, make_columns
from treering.engine.batch.step_inputs import (
    NOT_FINISHED,
    CommittedTokens,
    DraftTrees,
    SampleAndVerify,
    StepInputs,
    clip_drafts,
    count_accepted,
    fill_max_drafts,
    no_drafts,
    sample_and_verify,
)
from treering.engine.batch.token_batch import TokenBatch
from treering.engine.decoder.plain_decoder import Decoder
from treering.errors import ConfigError, InputError
from treering.history.budget import PassTimes, VerifyCosts, non_decreasing
from treering.history.draft.drafter import Drafter
from treering.history.draft_types import DraftRows, Drafts

Costs = Literal["measured", "none"]
"""Source of the drafter's pass costs. measured: measured here before the first pass, unless the drafter has costs.
none: no costs, so that no decision reads a clock, for runs that must repeat bit for bit."""

_MOST_TOKENS = 256
_TOKENS_PER_ROW = 8
_NUM_SINGLE = 8
"""Every count of drafts beyond a full batch is timed up to this one, because blocked kernels have stepped costs."""
_NUM_ROUNDS = 25
_BUDGET_S = 0.2
"""Time for all rounds; a round that has started always finishes."""
_FEW_ROUNDS = 5
_PATIENCE = 5
"""Factor on the budget for the first `_FEW_ROUNDS` rounds."""


def measure(
    decoder: Decoder,
    sampler: SampleAndVerify = sample_and_verify,
    *,
    num_slots: int,
    max_batch: int,
    context: int,
    clock: Callable[[], float] = time.perf_counter,
) -> VerifyCosts:
    """Return the seconds of passes over 1 to min(8 B, 256) tokens: the shortest of a few passes per size.

    Other load on the machine only makes passes longer, and a size that it hits more often would look too expensive for
    the engine's lifetime. So sizes alternate, and the shortest time counts. Tokens beyond the B-th are drafts, spread
    over the rows. All keys and values go to the spare slot, so running rollouts are not affected.

    Args:
        decoder: runs the passes.
        sampler: samples from its logits.
        num_slots: number of slots in its arena.
        max_batch: B.
        context: slots that each token sees, from 1 to a rollout's limit; capped at `num_slots`.
        clock: returns seconds.

    Raises:
        InputError: for a limit below 1.
        StateError: if a row of logits has NaN or +inf, or only -inf.

    Example: an engine with max_batch=8 times passes of 1, 2, 4, 8, 9, 10, ... 16, 24, 40 and 64 tokens, the last with
    8 rows and 7 drafts each.
    """
    if min(max_batch, context, num_slots) < 1:
        raise InputError(
            f"costs need at least one row that sees at least one slot, got max_batch={max_batch}, "
            f"context={context} and num_slots={num_slots}; raise them"
        )
    sizes = _sizes(max_batch)
    passes = [
        make_pass(size, decoder, sampler, num_slots=num_slots, max_batch=max_batch, context=context) for size in sizes
    ]
    for one_pass in passes:
        # The first pass of a size compiles, allocates and starts threads.
        one_pass()
    rounds: list[list[float]] = []
    start = clock()
    while needs_another_round(len(rounds), clock() - start, most=_NUM_ROUNDS, budget_s=_BUDGET_S):
        times = []
        for one_pass in passes:
            began = clock()
            one_pass()
            # A coarse clock may not advance during a short pass, but times must be positive.
            times.append(max(clock() - began, 1e-9))
        rounds.append(times)
    return VerifyCosts(num_tokens=np.array(sizes, np.int64), seconds=non_decreasing(np.min(rounds, axis=0)))


def needs_another_round(num_rounds: int, spent_s: float, *, most: int, budget_s: float) -> bool:
    """Return whether to measure another round: at least five if affordable, because other load may disturb a few.

    Example: with a budget of 0.2 s and at most 25 rounds, there are 20 rounds of 10 ms, or five of 150 ms. A round of
    0.6 s is followed by another, but a round of 2 s is not.
    """
    if num_rounds < _FEW_ROUNDS:
        return num_rounds == 0 or spent_s < _PATIENCE * budget_s
    return num_rounds < most and spent_s < budget_s


def _sizes(max_batch: int) -> list[int]:
    """Return 1, 2, 4, ... up to B, then B + 1 to B + 8, then B + 16, B + 32, ... up to min(8 B, 256)."""
    most = min(_TOKENS_PER_ROW * max_batch, _MOST_TOKENS)
    full = min(max_batch, most)
    doubled = [1 << power for power in range(most.bit_length())]
    drafted = [*range(1, _NUM_SINGLE), *(count for count in doubled if count >= _NUM_SINGLE)]
    fewer = [size for size in doubled if size < full]
    return [*fewer, full, *(full + count for count in drafted if full + count < most), *({most} - {full})]


def make_pass(
    num_tokens: int, decoder: Decoder, sampler: SampleAndVerify, *, num_slots: int, max_batch: int, context: int
) -> Callable[[], object]:
    """Return a function that runs and samples a pass of at most `max_batch` rows with `context` slots per token."""
    own_starts = np.arange(max_batch) * context % max(1, num_slots + 1 - context)
    context = min(context, num_slots)
    num_rows = min(num_tokens, own_starts.size)
    drafts = _chains(num_rows, num_tokens - num_rows)
    inputs = _inputs_of(drafts, own_starts[:num_rows], context, decoder.spare_slot)
    columns = make_columns(max_rows=num_rows, max_context=1, max_stops=1)
    return lambda: sampler(decoder.run(inputs.batch), inputs, columns, drafts)


def _chains(num_rows: int, num_drafts: int) -> DraftTrees:
    lengths = np.full(num_rows, num_drafts // num_rows) + (np.arange(num_rows) < num_drafts % num_rows)
    depths = np.concatenate([np.arange(1, length + 1) for length in lengths])
    return DraftTrees(
        tokens=np.zeros(num_drafts, np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        parents=(depths - 2).astype(np.int32),
        depths=depths,
        bits=np.zeros(num_drafts, np.int64),
        numbers=depths - 1,
    )


def _inputs_of(drafts: DraftTrees, own_starts: Int64Array, context: int, slot: int) -> StepInputs:
    """Return step inputs in which every token sees `context` slots of its row and writes to `slot`."""
    num_rows = own_starts.size
    row = np.repeat(np.arange(num_rows), 1 + np.diff(drafts.offsets))
    zeros, every = np.zeros(row.size, np.int64), np.ones(row.size, np.int64)
    batch = TokenBatch(
        tokens=zeros,
        positions=zeros,
        slots=every * slot,
        prefix_start=zeros,
        num_prefix=zeros,
        own_start=own_starts[row],
        num_own=every * context,
        tree_start=zeros,
        tree_bits=zeros,
        wanted=np.arange(row.size),
    )
    return StepInputs(
        batch=batch,
        rows=np.arange(num_rows),
        leaders=np.arange(num_rows),
        first_logits=np.arange(num_rows) + drafts.offsets[:-1],
        num_fed=np.ones(num_rows, np.int64),
    )


LOAD_S = 0.3
"""Extra seconds of a process's first drafts, which load the compiled drafter; 0.26 measured on two slow cores."""
COMPILE_S = 20.0
"""Extra seconds after an installation, when the drafter is compiled; 10 to 15 measured there."""
_NUM_TRIED = 4
"""Steps with drafts after which their gain counts."""
_KEPT = 0.8
"""Share of the old gain that remains after a new step."""
_FIRST_REST, _LONGER, _LONGEST_REST = 32, 4, 4096
"""Steps without drafts after steps that lost time; each further loss makes the rest longer."""
_PLAIN_EVERY = 48
"""While drafts pay off, one of this many steps makes none, to keep its time known."""
_MOST_SAVED = 2.0
"""Most savings that may be lost again later, as a multiple of the budget."""


@dataclass(slots=True, kw_only=True)
class _Gain:
    """Result of drafts near one number of rows: seconds that their tokens would have taken, and seconds taken."""

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
    """Costs and gains of drafts, measured in an engine's own steps.

    Args:
        max_loss: share of all steps' time that drafts may cost without paying off, in [0, 1].
        load_s: extra seconds of the first drafts, such as `COMPILE_S`.

    Raises:
        ConfigError: if max_loss is not such a share.

    Example: with max_loss=0.02, 30 s of steps so far and no drafts yet, drafts may lose 0.6 s: enough to load the
    drafter and try a few steps. If these are slower, the next 32 such steps make no drafts, then 128, 512, ...
    """

    def __init__(self, *, max_loss: float = 0.025, load_s: float = LOAD_S) -> None:
        """Start without times; the first steps make no drafts."""
        if not isinstance(max_loss, int | float) or not 0 <= max_loss <= 1:
            raise ConfigError(f"max_loss must be a share of the time in [0, 1], got {max_loss!r}; 0.025 allows 2.5 %")
        self.horizon_s = 0.0
        """Seconds that all steps of the run will take, as far as known; the budget is a share of this or of `total_s`,
        whichever is larger."""
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
        """Seconds that drafts may still lose."""
        allowed = self._max_loss * max(self.horizon_s, self.total_s)
        return allowed + min(self.saved_s, _MOST_SAVED * allowed)

    def can_spend(self, seconds: float) -> bool:
        """Return whether drafts may cost `seconds`, plus the drafter's loading time before the first draft."""
        return seconds + (0.0 if self._num_drafted_steps else self._load_s) <= self.budget_s

    def is_promising(self) -> bool:
        """Return whether drafts pay off at some number of rows, or still have to be tried at one."""
        gains = self._gains.values()
        return not gains or any(gain.num_steps < _NUM_TRIED or gain.pays or gain.num_left == 0 for gain in gains)

    def note_overhead(self, seconds: float) -> None:
        """Record seconds that drafts cost outside steps, such as for the history."""
        self.total_s += seconds
        self.saved_s -= seconds

    def may_draft(self, num_rows: int) -> bool:
        """Return whether this step should look for drafts."""
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
        """Record the outcome of a step without prefill.

        Args:
            num_new: int64 [B], tokens that each row gained.
            is_finished: bool [B], rows that ended.
            num_waiting: requests without a row.
            drafted: whether the step looked for drafts.
            seconds: time of the whole step, drafting included.
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
            # The time to load the drafter does not predict later steps.
            return
        self._update(self._gains.setdefault(num_rows.bit_length(), _Gain()), expected_s, seconds)

    def note_pass(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a pass without prefill."""
        self._passes.note(num_tokens, seconds)

    def new_costs(self) -> VerifyCosts | None:
        """Return new pass costs if the drafter has none or enough passes were timed since the last; else None."""
        return self._passes.new_costs()

    def _plain_s(self, num_new: Int64Array, is_finished: BoolArray, num_waiting: int) -> float:
        """Return the seconds that the step's tokens would have taken without drafts, at least.

        If requests wait, each finished row is replaced, and a token takes its share of a step. Otherwise the slowest
        row decides how many steps are saved, and each further token only makes a step narrower.
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


class Speculation:
    """Runner of an engine's drafter, if it has one."""

    def __init__(self, drafter: Drafter | None, *, vocab_size: int, costs: Costs | ObservedCosts) -> None:
        """Use `drafter`, or draft nothing if it is None; `vocab_size` is the model's."""
        self._drafter = drafter
        self.wants_costs = drafter is not None and costs == "measured" and drafter.costs is None
        """Whether to measure the costs before the next pass."""
        self._observed = costs if isinstance(costs, ObservedCosts) else None
        self._has_looked = False
        self._vocab_size = vocab_size
        self._rows: DraftRows | None = None
        self._num_changes = -1
        self._latest: tuple[Drafts, DraftTrees] | None = None

    def use_costs(self, costs: VerifyCosts) -> None:
        """Pass the costs on to the drafter, if there is one."""
        self.wants_costs = False
        if self._drafter is not None:
            self._drafter.use_costs(costs)

    def note_pass(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a pass without prefill."""
        if self._observed is not None:
            self._observed.note_pass(num_tokens, seconds)

    def note_step(self, committed: CommittedTokens, *, num_waiting: int, seconds: float) -> None:
        """Record a whole step without prefill."""
        if self._observed is not None and committed.num_new.size > 0:
            is_finished = committed.finish != NOT_FINISHED
            self._observed.note_step(
                committed.num_new, is_finished, num_waiting=num_waiting, drafted=self._has_looked, seconds=seconds
            )

    def propose(
        self,
        table: Table,
        leaders: Int64Array,
        *,
        has_prefill: bool = False,
        without: BoolArray | None = None,
        is_last: bool = False,
    ) -> DraftTrees:
        """Return drafts for all decoding rows, except duplicates and rows in `without`, bool [B].

        With `ObservedCosts`, steps with prefill make no drafts, because their times say nothing about drafts. `is_last`
        is for `Drafter.propose`.
        """
        self._latest, self._has_looked = None, False
        if self._drafter is None or not self._may_draft(self._drafter, table.num_rows, has_prefill):
            return no_drafts(table.num_rows)
        self._has_looked = True
        if self._rows is None or self._num_changes != table.num_changes:
            self._num_changes = table.num_changes
            self._rows = _rows_of(table)
        c = table.columns
        rows = self._rows
        assert rows.leaders is not None
        rows.leaders[:] = leaders
        fill_max_drafts(c.is_ready, c.num_tokens, c.num_computed, c.limit, rows.leaders, rows.max_drafts)
        if without is not None:
            rows.max_drafts[without] = 0
        drafts = self._drafter.propose(rows, is_last=is_last)
        proposed = clip_drafts(drafts, rows.max_drafts, self._vocab_size, c.stop_tokens[: table.num_rows])
        if drafts.tokens.size > 0:
            self._latest = drafts, proposed
        return proposed

    def give_feedback(self, committed: CommittedTokens) -> None:
        """Report to the drafter which of the latest drafts were accepted, if there were any.

        No draft exceeds a row's limit (`fill_max_drafts`), so the tokens alone show which drafts were accepted.
        """
        if self._drafter is None or self._rows is None or self._latest is None:
            return
        rows = self._rows
        assert rows.leaders is not None
        accepted, leaves = count_accepted(
            *self._latest, rows.leaders, rows.tokens, rows.num_tokens, committed.num_accepted, committed.leaves
        )
        self._drafter.observe(rows, accepted, leaves=leaves)

    def _may_draft(self, drafter: Drafter, num_rows: int, has_prefill: bool) -> bool:
        if self._observed is None:
            return not drafter.is_backing_off()
        if has_prefill or not self._observed.may_draft(num_rows):
            return False
        costs = self._observed.new_costs()
        if costs is not None:
            drafter.use_costs(costs)
        return not drafter.is_backing_off()


def _rows_of(table: Table) -> DraftRows:
    """Return views of the running rows, valid until a row is added or removed; each step updates them in place."""
    c, num_rows = table.columns, table.num_rows
    # The history has whole episodes, so a turn is matched by the observations before it.
    is_call = np.array([request.call is not None for request in table.requests], bool)
    return DraftRows(
        prompt_ids=[request.prompt_id for request in table.requests],
        groups=c.groups[:num_rows],
        tokens=c.tokens[:num_rows],
        num_tokens=c.num_tokens[:num_rows],
        num_prompt_tokens=np.where(is_call, 0, c.num_prompt[:num_rows]),
        max_drafts=np.zeros(num_rows, np.int64),
        row_ids=c.row_ids[:num_rows],
        leaders=np.arange(num_rows),
    )
