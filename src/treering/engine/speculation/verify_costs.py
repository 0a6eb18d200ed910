"""Measures the time of a forward pass by its number of tokens, on synthetic rows.

The drafter uses the times to decide how many tokens to draft.

    T tokens of a pass   B rows at most
"""

import time
from collections.abc import Callable
from typing import Literal

import numpy as np

from treering.arrays import Int64Array
from treering.engine.batch.draft_tree import DraftTrees
from treering.engine.batch.sampler import SampleAndVerify, sample_and_verify
from treering.engine.batch.state import StepInputs, make_columns
from treering.engine.batch.token_batch import TokenBatch
from treering.engine.decoder.protocol import Decoder
from treering.errors import InputError
from treering.history.budget.costs import VerifyCosts
from treering.history.budget.pass_times import non_decreasing

Costs = Literal["measured", "none"] | VerifyCosts
"""Pass costs that an engine gives its drafter. measured: measured here before the first pass, unless the drafter has
costs. none: no costs. A `VerifyCosts` is used as it is. With the last two no clock decides, for runs that must repeat
bit for bit."""

_MOST_TOKENS = 256
_TOKENS_PER_ROW = 8
_NUM_SINGLE = 8
"""Up to this many drafts beyond a full batch every count is timed: kernels that work in blocks have stepped costs."""
_NUM_ROUNDS = 25
_BUDGET_S = 0.2
"""Time for all rounds; a started round always finishes."""
_FEW_ROUNDS = 5
_PATIENCE = 5
"""The first `_FEW_ROUNDS` rounds may take this many budgets."""


def measure(
    decoder: Decoder,
    sampler: SampleAndVerify = sample_and_verify,
    *,
    num_slots: int,
    max_batch: int,
    context: int,
    clock: Callable[[], float] = time.perf_counter,
) -> VerifyCosts:
    """Seconds of passes over 1 to min(8 B, 256) tokens; the shortest of a few passes each.

    Other load on the machine only makes passes longer, and a size that it hits more often would look too expensive for
    as long as the engine runs. So the sizes alternate, and the shortest time counts. Tokens beyond the B-th are drafts,
    spread over the rows. All keys and values are written to the spare slot, so running rollouts are not affected.

    Args:
        decoder: runs the passes.
        sampler: samples from its logits.
        num_slots: slots of its arena.
        max_batch: B.
        context: slots that each token sees, from 1 to a rollout's limit; capped at `num_slots`.
        clock: seconds.

    Raises:
        InputError: a limit below 1.
        StateError: logits with NaN or +inf, or -inf only.

    Example: an engine with max_batch=8 times passes of 1, 2, 4, 8, 9, 10, ... 16, 24, 40 and 64 tokens, the last as 8
    rows with 7 drafts each.
    """
    if min(max_batch, context, num_slots) < 1:
        raise InputError(
            f"costs are measured for at least one row that sees at least one slot, got max_batch={max_batch}, "
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
        rounds.append([_time(one_pass, clock) for one_pass in passes])
    return VerifyCosts(num_tokens=np.array(sizes, np.int64), seconds=non_decreasing(np.min(rounds, axis=0)))


def needs_another_round(num_rounds: int, spent_s: float, *, most: int, budget_s: float) -> bool:
    """Whether to measure another round: at least five where affordable, because other load may disturb a few.

    Example: with a budget of 0.2 s and at most 25 rounds, there are 20 rounds of 10 ms, or five of 150 ms. A round of
    0.6 s is followed by another, one of 2 s is not.
    """
    if num_rounds < _FEW_ROUNDS:
        return num_rounds == 0 or spent_s < _PATIENCE * budget_s
    return num_rounds < most and spent_s < budget_s


def _sizes(max_batch: int) -> list[int]:
    """1, 2, 4, ... up to B, then B + 1 to B + 8, then B + 16, B + 32, ... up to min(8 B, 256)."""
    most = min(_TOKENS_PER_ROW * max_batch, _MOST_TOKENS)
    full = min(max_batch, most)
    doubled = [1 << power for power in range(most.bit_length())]
    drafted = [*range(1, _NUM_SINGLE), *(count for count in doubled if count >= _NUM_SINGLE)]
    fewer = [size for size in doubled if size < full]
    return [*fewer, full, *(full + count for count in drafted if full + count < most), *({most} - {full})]


def make_pass(
    num_tokens: int, decoder: Decoder, sampler: SampleAndVerify, *, num_slots: int, max_batch: int, context: int
) -> Callable[[], object]:
    """A callable that runs a pass and samples: at most `max_batch` rows, `context` visible slots for each token."""
    own_starts = np.arange(max_batch) * context % max(1, num_slots + 1 - context)
    context = min(context, num_slots)
    num_rows = min(num_tokens, own_starts.size)
    drafts = _chains(num_rows, num_tokens - num_rows)
    inputs = _inputs_of(drafts, own_starts[:num_rows], context, decoder.spare_slot)
    columns = make_columns(max_rows=num_rows, max_context=1, max_stops=1)
    return lambda: sampler(decoder.run(inputs.batch), inputs, columns, drafts)


def _time(one_pass: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    one_pass()
    # A coarse clock may not advance during a short pass; times must be positive.
    return max(clock() - start, 1e-9)


def _chains(num_rows: int, num_drafts: int) -> DraftTrees:
    """Draft chains of zeros, of lengths as equal as possible."""
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
    """Step inputs in which every token sees `context` slots of its row and writes the slot `slot`."""
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
