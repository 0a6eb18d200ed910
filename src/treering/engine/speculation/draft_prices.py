"""What drafting costs beside the passes, measured: drafts for made-up rows from a made-up history, behind real passes.

Knows drafting as every step does it. Knows nothing of the run's own drafter and table, which stay as they are, and what
is done with the result.

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
from treering.engine.batch.draw import Draw
from treering.engine.batch.table import Table
from treering.engine.decoder.protocol import Decoder
from treering.engine.kv_cache.allocator import SpanAllocator
from treering.engine.request import Request, Sampling
from treering.engine.speculation.speculation import Speculation
from treering.engine.speculation.verify_costs import goes_on, measure, plan
from treering.history.budget.costs import DraftPrices, VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.store.store import HistoryStore
from treering.types import TokenIds

_Result = TypeVar("_Result")

_NUM_ROUNDS = 15
_BUDGET_S = 0.1
"""Spent on rounds; one is finished however long it takes."""
_GROUP_SIZE = 8
_LENGTH = 256
_VOCAB_SIZE = 512
_FIRST_LENGTH = 32
_STEP = 4
_SHARE_OF_EDITS = 0.1
_FEW, _MANY = 1, 12
"""Tokens of a row's draft at most, of which the price of a token is the difference."""


class Spent(NamedTuple):
    """One step's drafting."""

    looking: float  # seconds until drafts stand as a pass takes them
    plain: float  # seconds of a pass behind a pass
    behind: float  # seconds of a pass behind looking
    learning: float  # seconds
    num_drafted: int


def measure_with_prices(decoder: Decoder, draw: Draw, *, num_slots: int, max_batch: int, context: int) -> VerifyCosts:
    """Seconds of passes, as `verify_costs.measure` has them, with the prices of drafting behind plain ones.

    Raises:
        InputError: a limit below 1.
        StateError: logits that are no distribution.

    Example: an engine with max_batch=8 runs passes of 1 to 64 tokens, and then drafts behind passes of 8.
    """
    costs = measure(decoder, draw, num_slots=num_slots, max_batch=max_batch, context=context)
    one_pass = plan(max_batch, decoder, draw, num_slots=num_slots, max_batch=max_batch, context=context)
    return replace(costs, prices=measure_prices(one_pass, max_batch=max_batch))


def measure_prices(
    one_pass: Callable[[], object], *, max_batch: int, clock: Callable[[], float] = time.perf_counter
) -> DraftPrices:
    """Seconds of looking, growing and learning: medians of some rounds, in which sizes take turns; of passes the least.

    A step's drafting begins where a pass has filled the machine's caches with weights, and takes a multiple of what it
    takes again and again. So a pass stands before each part that is timed. Behind drafting it is the pass that takes
    longer, which is part of the price of a look. Of passes the least counts: where threads wait for each other, what
    takes a processor strikes most of them, and the difference of two such passes means nothing.

    Args:
        one_pass: computes a pass of the engine, of no account otherwise.
        max_batch: B.
        clock: seconds.

    Example: an engine with max_batch=8 times drafts of 1 and of 12 tokens for 8 rows, and of 1 token for one row.
    """
    whole, single = Steps(max_batch, one_pass, clock), Steps(1, one_pass, clock)
    for steps in (whole, single):
        steps.draft(_FEW)
    rounds: list[tuple[Spent, Spent, Spent]] = []
    start = clock()
    while goes_on(len(rounds), clock() - start, most=_NUM_ROUNDS, budget_s=_BUDGET_S):
        rounds.append((whole.draft(_MANY), whole.draft(_FEW), single.draft(_FEW)))
    many, few, alone = (_middle(spent) for spent in zip(*rounds, strict=True))
    return prices_of(many, few, alone, num_rows=max_batch)


def prices_of(many: Spent, few: Spent, alone: Spent, *, num_rows: int) -> DraftPrices:
    """The prices that explain three steps: many and few tokens for `num_rows` rows, and few for a single one.

    What rounding and noise would make a price below 0 is 0.

    Example: looking for 8 rows in 220 us with 60 tokens and in 120 us with 10, and for one row in 36 us with one token,
    are 2 us a token, 10 us a row and 24 us a look, to which comes what the pass behind it takes longer.
    """
    num_more = many.num_drafted - few.num_drafted
    grown, drafted = (
        max(0.0, (more - less) / num_more) if num_more > 0 else 0.0
        for more, less in ((many.looking, few.looking), (many.learning, few.learning))
    )
    bare, bare_alone = few.looking - grown * few.num_drafted, alone.looking - grown * alone.num_drafted
    row = max(0.0, (bare - bare_alone) / (num_rows - 1)) if num_rows > 1 else 0.0
    return DraftPrices(
        look=max(0.0, bare - row * num_rows) + max(0.0, few.behind - few.plain),
        row=row,
        grown=grown,
        learn=max(0.0, few.learning - drafted * few.num_drafted),
        drafted=drafted,
    )


class Steps:
    """A table of rows that go on by some tokens from step to step, and drafts from earlier rollouts like theirs."""

    def __init__(self, num_rows: int, one_pass: Callable[[], object], clock: Callable[[], float]) -> None:
        """Groups of rows, each with a prompt of its own and a history of as many rollouts."""
        self._one_pass, self._clock = one_pass, clock
        rng = np.random.default_rng(0)
        store = HistoryStore()
        self._texts: list[TokenIds] = []
        self._table = Table(max_rows=num_rows, arena=SpanAllocator(num_rows * _LENGTH), seed=0)
        for row in range(num_rows):
            group, number = divmod(row, _GROUP_SIZE)
            if number == 0:
                text = rng.integers(0, _VOCAB_SIZE, _LENGTH, dtype=np.int32)
                store.add(str(group), [_edited(text, rng) for _ in range(_GROUP_SIZE)], version=0)
            self._texts.append(_edited(text, rng))
            self._add(_request(row))
        store.publish()
        self._speculation = Speculation(Drafter(store), vocab_size=_VOCAB_SIZE, costs="none")

    def draft(self, most: int) -> Spent:
        """A step with so many drafted tokens a row at most; the likeliest ones come true, so the next are no fewer."""
        self._go_on(most)
        self._one_pass()
        _, plain = self._time(self._one_pass)
        proposed, looking = self._time(self._propose)
        _, behind = self._time(self._one_pass)
        gains = _gains_of(proposed)
        _, learning = self._time(lambda: self._speculation.learn(gains))
        return Spent(looking, plain, behind, learning, int(proposed.tokens.size))

    def _go_on(self, most: int) -> None:
        """Rows have more tokens and room for `most` drafts; another one takes a row's place, as happens in batches."""
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
        table.prefixes.expect(request.prompt)
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
    """Of a prompt of one token, behind which the row's text stands."""
    return Request(
        prompt_id=str(row // _GROUP_SIZE),
        prompt=np.zeros(1, np.int32),
        sampling=Sampling(max_tokens=_LENGTH),
        sample=row,
    )


def _gains_of(proposed: DraftTrees) -> CommittedTokens:
    """All tokens of each row's likeliest path came true."""
    chains = np.concatenate([[0], np.cumsum(proposed.bits == 0)])[proposed.offsets]
    accepted, nothing = np.diff(chains), np.zeros(0, np.int64)
    return CommittedTokens(
        num_new=nothing, finish=nothing, num_accepted=accepted, leaves=accepted - 1, sources=nothing, targets=nothing
    )


def _edited(text: TokenIds, rng: np.random.Generator) -> TokenIds:
    """A copy in which every tenth token is another."""
    edits = rng.integers(0, _VOCAB_SIZE, text.size, dtype=np.int32)
    copy: TokenIds = np.where(rng.random(text.size) < _SHARE_OF_EDITS, edits, text)
    return copy


def _middle(spent: tuple[Spent, ...]) -> Spent:
    """The median of each, and the least of passes."""
    looking, plain, behind, learning, num_drafted = zip(*spent, strict=True)
    return Spent(median(looking), min(plain), min(behind), median(learning), round(median(num_drafted)))
