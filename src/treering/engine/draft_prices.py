"""What drafting costs beside the passes, measured: drafts for made-up rows from a made-up history, behind real passes.

Knows a drafter as every step calls it. Knows nothing of the run's own drafter, whose rows and estimates stay as they
are, and what is done with the result.

    B rows   L tokens of a context
"""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.engine.decoder import Decoder
from treering.engine.drawing import Draw
from treering.engine.proposed import readable
from treering.engine.verify_costs import measure, plan
from treering.history.costs import DraftPrices, VerifyCosts
from treering.history.draft import Drafter
from treering.history.records import DraftRows
from treering.history.store import HistoryStore

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
    """Seconds of looking, growing and learning; the medians of some rounds, in which sizes take turns.

    A step's drafting begins where a pass has filled the machine's caches with weights, and takes a multiple of what it
    takes again and again. So a pass stands before each part that is timed.

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
    while not rounds or (len(rounds) < _NUM_ROUNDS and clock() - start < _BUDGET_S):
        rounds.append((whole.draft(_MANY), whole.draft(_FEW), single.draft(_FEW)))
    many, few, alone = (_middle(spent) for spent in zip(*rounds, strict=True))
    return prices_of(many, few, alone, num_rows=max_batch)


def prices_of(many: Spent, few: Spent, alone: Spent, *, num_rows: int) -> DraftPrices:
    """The prices that explain three steps: many and few tokens for `num_rows` rows, and few for a single one.

    What rounding and noise would make a price below 0 is 0.

    Example: looking for 8 rows in 220 us with 60 tokens and in 120 us with 10, and for one row in 36 us with one token,
    are 2 us a token, 10 us a row and 24 us a look.
    """
    num_more = many.num_drafted - few.num_drafted
    grown, drafted = (
        max(0.0, (more - less) / num_more) if num_more > 0 else 0.0
        for more, less in ((many.looking, few.looking), (many.learning, few.learning))
    )
    bare, bare_alone = few.looking - grown * few.num_drafted, alone.looking - grown * alone.num_drafted
    row = max(0.0, (bare - bare_alone) / (num_rows - 1)) if num_rows > 1 else 0.0
    return DraftPrices(
        look=max(0.0, bare - row * num_rows),
        row=row,
        grown=grown,
        learn=max(0.0, few.learning - drafted * few.num_drafted),
        drafted=drafted,
    )


class Steps:
    """Rows that go on by some tokens from step to step, and a drafter that knows earlier rollouts like theirs."""

    def __init__(self, num_rows: int, one_pass: Callable[[], object], clock: Callable[[], float]) -> None:
        """Groups of rows, each with a prompt of its own and a history of as many rollouts."""
        self._one_pass, self._clock = one_pass, clock
        rng = np.random.default_rng(0)
        store, tokens = HistoryStore(), np.zeros((num_rows, _LENGTH), np.int32)
        groups = np.arange(num_rows) // _GROUP_SIZE
        for group in range(int(groups[-1]) + 1):
            text = rng.integers(0, _VOCAB_SIZE, _LENGTH, dtype=np.int32)
            store.add(str(group), [_edited(text, rng) for _ in range(_GROUP_SIZE)], version=0)
            for row in np.flatnonzero(groups == group):
                tokens[row] = _edited(text, rng)
        store.publish()
        self._drafter = Drafter(store)
        self._rows = DraftRows(
            prompt_ids=[str(group) for group in groups],
            groups=groups,
            tokens=tokens,
            num_tokens=np.full(num_rows, _FIRST_LENGTH),
            num_prompt_tokens=np.ones(num_rows, np.int64),
            max_drafts=np.zeros(num_rows, np.int64),
            row_ids=np.arange(num_rows),
        )

    def draft(self, most: int) -> Spent:
        """A step with so many drafted tokens a row at most; the likeliest ones come true, so the next are no fewer."""
        rows, clock = self._rows, self._clock
        rows.max_drafts[:] = most
        rows.num_tokens[:] = np.where(rows.num_tokens + _STEP < _LENGTH, rows.num_tokens + _STEP, _FIRST_LENGTH)
        self._one_pass()
        start = clock()
        drafts = self._drafter.propose(rows)
        proposed = readable(drafts, rows.max_drafts, _VOCAB_SIZE)
        looking = clock() - start
        chains = np.concatenate([[0], np.cumsum(proposed.bits == 0)])[proposed.offsets]
        accepted = np.diff(chains)
        self._one_pass()
        start = clock()
        self._drafter.observe(rows, accepted)
        return Spent(looking, clock() - start, int(drafts.tokens.size))


def _edited(text: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.int32]:
    """A copy in which every tenth token is another."""
    edits = rng.integers(0, _VOCAB_SIZE, text.size, dtype=np.int32)
    copy: NDArray[np.int32] = np.where(rng.random(text.size) < _SHARE_OF_EDITS, edits, text)
    return copy


def _middle(spent: tuple[Spent, ...]) -> Spent:
    """The median of each."""
    looking, learning, num_drafted = zip(*spent, strict=True)
    return Spent(median(looking), median(learning), round(median(num_drafted)))
