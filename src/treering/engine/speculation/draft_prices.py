"""Measures the cost of drafting: times drafts for synthetic rows from a synthetic history, between real passes.

The run's own drafter and table are not touched.

    B rows
"""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np

from treering.engine.batch.commit import CommittedTokens
from treering.engine.batch.draft_tree import DraftTrees
from treering.engine.batch.sampler import SampleAndVerify
from treering.engine.batch.table import Table
from treering.engine.decoder.protocol import Decoder
from treering.engine.kv_cache.allocator import SpanAllocator
from treering.engine.request import Request, Sampling
from treering.engine.speculation.speculation import Speculation
from treering.engine.speculation.verify_costs import make_pass, measure, needs_another_round
from treering.history.budget.costs import DraftPrices, VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.store.store import HistoryStore
from treering.types import TokenIds

_Result = TypeVar("_Result")

_NUM_ROUNDS = 15
_BUDGET_S = 0.1
"""Time for all rounds; a started round always finishes."""
_GROUP_SIZE = 8
_LENGTH = 256
_VOCAB_SIZE = 512
_FIRST_LENGTH = 32
_STEP = 4
_SHARE_OF_EDITS = 0.1
_FEW, _MANY = 1, 12
"""Most draft tokens of a row; the price of a token comes from the difference between the two."""


class StepTimes(NamedTuple):
    """One step's times in seconds."""

    drafting: float  # proposing and clipping drafts
    plain_pass: float  # a pass after a pass
    pass_after_drafting: float  # a pass after drafting
    feedback: float  # feedback to the drafter
    num_drafted: int


def measure_with_prices(
    decoder: Decoder, sampler: SampleAndVerify, *, num_slots: int, max_batch: int, context: int
) -> VerifyCosts:
    """Measures passes (see `verify_costs.measure`), then the prices of drafting after a full batch's passes.

    Raises:
        InputError: a limit below 1.
        StateError: logits with NaN or +inf, or -inf only.

    Example: an engine with max_batch=8 times passes of 1 to 64 tokens, then drafting after passes of 8.
    """
    costs = measure(decoder, sampler, num_slots=num_slots, max_batch=max_batch, context=context)
    one_pass = make_pass(max_batch, decoder, sampler, num_slots=num_slots, max_batch=max_batch, context=context)
    return replace(costs, prices=measure_prices(one_pass, max_batch=max_batch))


def measure_prices(
    one_pass: Callable[[], object], *, max_batch: int, clock: Callable[[], float] = time.perf_counter
) -> DraftPrices:
    """Measures the seconds of searching, drafting and feedback: medians over rounds that alternate the sizes.

    A pass fills the CPU caches with weights, so drafting right after a pass takes several times as long as drafting in
    a loop. So a pass precedes each timed part. Drafting slows the next pass in the same way; that difference is part
    of the price of a search. Passes count by their minimum: interference from other processes hits most multi-threaded
    passes, and the difference of two disturbed passes is meaningless.

    Args:
        one_pass: computes a pass of the engine; its result is ignored.
        max_batch: B.
        clock: seconds.

    Example: an engine with max_batch=8 times drafts of 1 and of 12 tokens for 8 rows, and of 1 token for one row.
    """
    whole, single = SyntheticSteps(max_batch, one_pass, clock), SyntheticSteps(1, one_pass, clock)
    for steps in (whole, single):
        steps.draft(_FEW)
    rounds: list[tuple[StepTimes, StepTimes, StepTimes]] = []
    start = clock()
    while needs_another_round(len(rounds), clock() - start, most=_NUM_ROUNDS, budget_s=_BUDGET_S):
        rounds.append((whole.draft(_MANY), whole.draft(_FEW), single.draft(_FEW)))
    many, few, alone = (_median_times(spent) for spent in zip(*rounds, strict=True))
    return prices_of(many, few, alone, num_rows=max_batch)


def prices_of(many: StepTimes, few: StepTimes, alone: StepTimes, *, num_rows: int) -> DraftPrices:
    """Solves for the prices from three steps: many and few tokens for `num_rows` rows, and few for a single row.

    Negative prices, from noise, become 0.

    Example: searching for 8 rows in 220 us with 60 tokens and in 120 us with 10, and for one row in 36 us with one
    token, gives 2 us a token, 10 us a row and 24 us a search, plus the slowdown of the next pass.
    """
    num_more = many.num_drafted - few.num_drafted
    grown, drafted = (
        max(0.0, (more - less) / num_more) if num_more > 0 else 0.0
        for more, less in ((many.drafting, few.drafting), (many.feedback, few.feedback))
    )
    bare, bare_alone = few.drafting - grown * few.num_drafted, alone.drafting - grown * alone.num_drafted
    row = max(0.0, (bare - bare_alone) / (num_rows - 1)) if num_rows > 1 else 0.0
    return DraftPrices(
        look=max(0.0, bare - row * num_rows) + max(0.0, few.pass_after_drafting - few.plain_pass),
        row=row,
        grown=grown,
        learn=max(0.0, few.feedback - drafted * few.num_drafted),
        drafted=drafted,
    )


class SyntheticSteps:
    """Synthetic steps: a table of rows that grow by a few tokens per step, with a history of similar rollouts."""

    def __init__(self, num_rows: int, one_pass: Callable[[], object], clock: Callable[[], float]) -> None:
        """Makes groups of rows, each with its own prompt and a history of as many rollouts."""
        self._one_pass, self._clock = one_pass, clock
        rng = np.random.default_rng(0)
        store = HistoryStore()
        self._texts: list[TokenIds] = []
        self._table = Table(max_rows=num_rows, allocator=SpanAllocator(num_rows * _LENGTH), seed=0)
        for row in range(num_rows):
            group, number = divmod(row, _GROUP_SIZE)
            if number == 0:
                text = rng.integers(0, _VOCAB_SIZE, _LENGTH, dtype=np.int32)
                store.add(str(group), [_edited(text, rng) for _ in range(_GROUP_SIZE)], version=0)
            self._texts.append(_edited(text, rng))
            self._add(_request(row))
        store.publish()
        self._speculation = Speculation(Drafter(store), vocab_size=_VOCAB_SIZE, costs="none")

    def draft(self, most: int) -> StepTimes:
        """Times a step with at most `most` draft tokens per row; accepts the likeliest path, so drafts stay as long."""
        self._extend_rows(most)
        self._one_pass()
        _, plain_pass = self._time(self._one_pass)
        proposed, drafting = self._time(self._propose)
        _, pass_after_drafting = self._time(self._one_pass)
        committed = _accept_all(proposed)
        _, feedback = self._time(lambda: self._speculation.give_feedback(committed))
        return StepTimes(drafting, plain_pass, pass_after_drafting, feedback, int(proposed.tokens.size))

    def _extend_rows(self, most: int) -> None:
        """Extends the rows, limits them to `most` drafts, and replaces one row, as happens in real batches."""
        table = self._table
        if table.num_rows > 1:
            self._add(table.remove(0))
        c, rows = table.columns, slice(table.num_rows)
        longer = c.num_tokens[rows] + _STEP
        c.num_tokens[rows] = np.where(longer < _LENGTH, longer, _FIRST_LENGTH)
        c.num_computed[rows] = c.num_tokens[rows] - 1
        c.limit[rows] = c.num_tokens[rows] + most + 1

    def _propose(self) -> DraftTrees:
        return self._speculation.propose(self._table, np.arange(self._table.num_rows), num_waiting=1)

    def _add(self, request: Request) -> None:
        table = self._table
        table.prefixes.register(request.prompt)
        is_added = table.add(request)
        assert is_added, "each row has its room"
        row = table.num_rows - 1
        table.columns.tokens[row, :_LENGTH] = self._texts[request.sample]
        table.columns.num_tokens[row] = _FIRST_LENGTH

    def _time(self, work: Callable[[], _Result]) -> tuple[_Result, float]:
        start = self._clock()
        result = work()
        return result, self._clock() - start


def _request(row: int) -> Request:
    """A request with a one-token prompt; the row's text follows it."""
    return Request(
        prompt_id=str(row // _GROUP_SIZE),
        prompt=np.zeros(1, np.int32),
        sampling=Sampling(max_tokens=_LENGTH),
        sample=row,
    )


def _accept_all(proposed: DraftTrees) -> CommittedTokens:
    """The result of a step that accepted each row's likeliest path."""
    chains = np.concatenate([[0], np.cumsum(proposed.bits == 0)])[proposed.offsets]
    accepted, empty = np.diff(chains), np.zeros(0, np.int64)
    return CommittedTokens(
        num_new=empty, finish=empty, num_accepted=accepted, leaves=accepted - 1, sources=empty, targets=empty
    )


def _edited(text: TokenIds, rng: np.random.Generator) -> TokenIds:
    """A copy with a tenth of the tokens replaced."""
    edits = rng.integers(0, _VOCAB_SIZE, text.size, dtype=np.int32)
    copy: TokenIds = np.where(rng.random(text.size) < _SHARE_OF_EDITS, edits, text)
    return copy


def _median_times(spent: tuple[StepTimes, ...]) -> StepTimes:
    """The median of each field, the minimum for passes."""
    drafting, plain_pass, pass_after_drafting, feedback, num_drafted = zip(*spent, strict=True)
    return StepTimes(
        median(drafting), min(plain_pass), min(pass_after_drafting), median(feedback), round(median(num_drafted))
    )
