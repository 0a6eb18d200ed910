"""The running batch as arrays of columns, and the plan of a step's forward pass.

Rows 0 to B - 1 are running; the last row replaces a removed one, so rows are always dense.

    M max rows   B running rows   L longest context   Q stop tokens   T tokens of a pass   W sampled positions
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.arrays import BoolArray, Float64Array, Int32Array, Int64Array
from treering.compiling.lean import kernel
from treering.engine.batch.draft_tree import DraftTrees
from treering.engine.batch.token_batch import PER_TOKEN, TokenBatch


class BatchState(NamedTuple):
    """One entry per row, int64 [M] unless noted."""

    tokens: Int32Array  # [M, L] the context: prompt, then rollout
    logprobs: Float64Array  # [M, L] of the rollout's tokens, from column 0
    policy_logprobs: Float64Array  # [M, L]
    versions: Int32Array  # [M, L]
    was_sampled: BoolArray  # [M, L]
    num_tokens: Int64Array  # current length of the context
    num_prompt: Int64Array
    limit: Int64Array  # longest context
    num_computed: Int64Array  # context tokens whose keys and values are in the arena
    num_prefix: Int64Array  # of these, those in the shared span
    prefix_start: Int64Array
    own_start: Int64Array
    is_ready: BoolArray  # whether the shared span is computed
    keys: Int64Array  # of the noise
    groups: Int64Array  # equal for siblings
    row_ids: Int64Array  # unique id of the rollout, never reused
    temperature: Float64Array
    top_k: Int64Array  # 0 is all
    top_p: Float64Array
    log_min_p: Float64Array  # -inf is all
    penalty: Float64Array  # of repeated tokens; 1 is none
    stop_tokens: Int32Array  # [M, Q], padded with -1


class StepInputs(NamedTuple):
    """The inputs of a pass: the rows' tokens, and which rows are sampled from which logits."""

    batch: TokenBatch  # T tokens, W of them wanted
    rows: Int64Array  # [R] sampled rows
    leaders: Int64Array  # [R] the row computed for each of these: itself, or the one it duplicates
    first_logits: Int64Array  # [R] first entry of each among the wanted tokens
    num_fed: Int64Array  # [B] context tokens that the pass computes for the row or its leader, without drafts


def make_columns(*, max_rows: int, max_context: int, max_stops: int) -> BatchState:
    """Columns of zeros."""
    wide = (max_rows, max_context)
    whole = [np.zeros(max_rows, np.int64) for _ in range(10)]
    return BatchState(
        tokens=np.zeros(wide, np.int32),
        logprobs=np.zeros(wide),
        policy_logprobs=np.zeros(wide),
        versions=np.zeros(wide, np.int32),
        was_sampled=np.zeros(wide, bool),
        num_tokens=whole[0],
        num_prompt=whole[1],
        limit=whole[2],
        num_computed=whole[3],
        num_prefix=whole[4],
        prefix_start=whole[5],
        own_start=whole[6],
        is_ready=np.zeros(max_rows, bool),
        keys=whole[7],
        groups=whole[8],
        row_ids=whole[9],
        temperature=np.ones(max_rows),
        top_k=np.zeros(max_rows, np.int64),
        top_p=np.ones(max_rows),
        log_min_p=np.full(max_rows, -np.inf),
        penalty=np.ones(max_rows),
        stop_tokens=np.full((max_rows, max_stops), -1, np.int32),
    )


def widen(columns: BatchState, *, max_context: int, max_stops: int) -> BatchState:
    """Copies the rows into wider columns, for longer contexts or more stop tokens."""
    wider = make_columns(max_rows=columns.num_tokens.size, max_context=max_context, max_stops=max_stops)
    pairs: Iterator[tuple[NDArray[Any], NDArray[Any]]] = zip(columns, wider, strict=True)
    for old, new in pairs:
        new[tuple(slice(size) for size in old.shape)] = old
    return wider


def move_row(columns: BatchState, source: int, target: int) -> None:
    """Copies a row over another one."""
    num_tokens = columns.num_tokens[source]
    for column in columns:
        if column.ndim == 2 and column is not columns.stop_tokens:
            column[target, :num_tokens] = column[source, :num_tokens]
        else:
            column[target] = column[source]


@kernel
def fill_max_drafts(
    is_ready: BoolArray,
    num_tokens: Int64Array,
    num_computed: Int64Array,
    limit: Int64Array,
    leaders: Int64Array,
    max_drafts: Int64Array,
) -> None:
    """Fills `max_drafts` [B] with the number of draft tokens that each row has slots for; 0 unless the row is decoding.

    A duplicate row gets 0: it uses its leader's drafts. A rollout's last possible token is sampled but never computed,
    so the slots end one before the limit.
    """
    for row in range(max_drafts.size):
        decodes = leaders[row] == row and is_ready[row] and num_tokens[row] - num_computed[row] == 1
        max_drafts[row] = limit[row] - num_tokens[row] - 1 if decodes else 0


def plan_pass(columns: BatchState, leaders: Int64Array, max_prefill: int, drafts: DraftTrees) -> StepInputs:
    """Plans the next pass over rows 0 to B - 1 with leaders `leaders` [B].

    A duplicate row computes nothing; it is sampled from its leader's logits, along its leader's drafts. A decoding row
    (one missing token) computes that token and its drafts, and is sampled after each. A row that is missing more takes
    its share of `max_prefill`, and is sampled once nothing is missing. Drafts lie after the context in the row's own
    span, in the drafter's order, each at the position of its depth.
    """
    c, num_rows = columns, leaders.size
    # One array for all columns: numba unpacks each argument, which takes longer than filling it.
    per_token = np.empty((10, num_rows + max_prefill + drafts.tokens.size), np.int64)
    rows = np.empty((5, num_rows), np.int64)
    num_tokens, num_wanted, num_sampled = _fill_inputs(
        c.tokens, c.num_tokens, c.num_computed, c.num_prefix, c.prefix_start, c.own_start, c.is_ready, leaders,
        max_prefill, drafts.tokens, drafts.offsets, drafts.depths, drafts.bits, per_token, rows,
    )  # fmt: skip
    batch = TokenBatch(
        **dict(zip(PER_TOKEN, per_token[:9, :num_tokens], strict=True)), wanted=per_token[9, :num_wanted]
    )
    return StepInputs(batch, rows[0, :num_sampled], rows[1, :num_sampled], rows[2, :num_sampled], rows[3])


@kernel
def _fill_inputs(
    context: Int32Array,
    num_tokens: Int64Array,
    num_computed: Int64Array,
    num_prefixed: Int64Array,
    first_prefix: Int64Array,
    first_own: Int64Array,
    is_ready: BoolArray,
    leaders: Int64Array,
    max_prefill: int,
    draft_tokens: Int32Array,
    offsets: Int64Array,
    depths: Int64Array,
    bits: Int64Array,
    per_token: Int64Array,
    per_row: Int64Array,
) -> tuple[int, int, int]:
    """Fills the columns of `StepInputs`; returns the numbers of tokens, wanted tokens and rows."""
    tokens, positions, slots, prefix_start, num_prefix, own_start, num_own, tree_start, tree_bits = (
        per_token[0], per_token[1], per_token[2], per_token[3], per_token[4], per_token[5], per_token[6], per_token[7],
        per_token[8],
    )  # fmt: skip
    wanted, rows, row_leaders, first_logits, num_fed = per_token[9], per_row[0], per_row[1], per_row[2], per_row[3]
    first_of = per_row[4]
    at = num_wanted = num_sampled = 0
    for row in range(leaders.size):
        if leaders[row] != row:
            rows[num_sampled], row_leaders[num_sampled], num_fed[row] = row, leaders[row], 1
            first_logits[num_sampled] = first_of[leaders[row]]
            num_sampled += 1
            continue
        num_fed[row] = 0
        missing = num_tokens[row] - num_computed[row]
        if not is_ready[row] or (missing > 1 and max_prefill == 0):
            continue
        num_fed[row] = missing if missing == 1 else min(missing, max_prefill)
        max_prefill -= num_fed[row] if missing > 1 else 0
        first_draft, num_drafts = offsets[row], offsets[row + 1] - offsets[row]
        # Slots of its own span in use once the fed tokens are computed.
        num_filled = num_computed[row] + num_fed[row] - num_prefixed[row]
        is_sampled = num_fed[row] == missing
        if is_sampled:
            rows[num_sampled], row_leaders[num_sampled], first_logits[num_sampled] = row, row, num_wanted
            first_of[row] = num_wanted
            num_sampled += 1
        for step in range(num_fed[row] + num_drafts):
            prefix_start[at], num_prefix[at] = first_prefix[row], num_prefixed[row]
            own_start[at] = first_own[row]
            tree_start[at], tree_bits[at] = own_start[at] + num_filled, 0
            number = step - num_fed[row]
            if number < 0:
                positions[at] = num_computed[row] + step
                tokens[at] = context[row, positions[at]]
                num_own[at] = num_filled + number + 1
                slots[at] = own_start[at] + num_own[at] - 1
            else:
                draft = first_draft + number
                tokens[at], tree_bits[at] = draft_tokens[draft], bits[draft]
                positions[at] = num_prefix[at] + num_filled + depths[draft] - 1
                num_own[at] = num_filled + (number + 1 if tree_bits[at] == 0 else 0)
                slots[at] = tree_start[at] + number
            if is_sampled and number >= -1:
                wanted[num_wanted] = at
                num_wanted += 1
            at += 1
    return at, num_wanted, num_sampled
