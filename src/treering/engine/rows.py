"""The running rollouts as columns of numbers, and the two loops of a step over them: what to compute, what was gained.

Knows token counts, spans and stop tokens. Knows nothing of requests, weights or sampling. Rows 0 to B - 1 run; a row
that leaves is replaced by the last one, so that a step never looks at an empty one.

    M rows at most   B running rows   L longest context   Q stop tokens   T tokens of a pass   W sampled positions
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treering.types import TokenIds

Int64Array = NDArray[np.int64]

NOT_FINISHED, STOPPED, OUT_OF_ROOM = 0, 1, 2


class Columns(NamedTuple):
    """One entry per row: int64 [M] where nothing else is said."""

    tokens: NDArray[np.int32]  # [M, L] the context: prompt, then rollout
    logprobs: NDArray[np.float64]  # [M, L] of the rollout's tokens, from column 0
    policy_logprobs: NDArray[np.float64]  # [M, L]
    versions: NDArray[np.int32]  # [M, L]
    was_sampled: NDArray[np.bool_]  # [M, L]
    num_tokens: Int64Array  # context so far
    num_prompt: Int64Array
    limit: Int64Array  # context at most
    num_computed: Int64Array  # tokens of the context whose keys and values are in the arena
    num_prefix: Int64Array  # of these, those in the shared span
    prefix_start: Int64Array
    own_start: Int64Array
    is_ready: NDArray[np.bool_]  # whether the shared span is computed
    keys: Int64Array  # of the noise
    groups: Int64Array  # equal for siblings
    temperature: NDArray[np.float64]
    top_k: Int64Array  # 0 is all
    top_p: NDArray[np.float64]
    stop_tokens: NDArray[np.int32]  # [M, Q], -1 where a row has fewer


class Work(NamedTuple):
    """What a pass computes: the columns of a `TokenBatch`, and which rows are sampled from which logits."""

    tokens: Int64Array  # [T], as the six behind it
    positions: Int64Array
    slots: Int64Array
    prefix_start: Int64Array
    num_prefix: Int64Array
    own_start: Int64Array
    num_own: Int64Array
    wanted: Int64Array  # [W]
    rows: Int64Array  # rows that are sampled
    first_logits: Int64Array  # for each of these, its first entry of `wanted`
    num_fed: Int64Array  # [B] context tokens that the pass computes, drafts left out


class Gains(NamedTuple):
    """What a step gave to the rows that were sampled, in the order of `Work.rows`."""

    num_new: Int64Array  # tokens that the rollout gained
    num_accepted: Int64Array  # of these, drafted ones
    finish: Int64Array  # NOT_FINISHED, STOPPED or OUT_OF_ROOM


def make_columns(*, max_rows: int, max_context: int, max_stops: int) -> Columns:
    """Columns of zeros."""
    wide = (max_rows, max_context)
    whole = [np.zeros(max_rows, np.int64) for _ in range(9)]
    return Columns(
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
        temperature=np.ones(max_rows),
        top_k=np.zeros(max_rows, np.int64),
        top_p=np.ones(max_rows),
        stop_tokens=np.full((max_rows, max_stops), -1, np.int32),
    )


def widen(columns: Columns, *, max_context: int, max_stops: int) -> Columns:
    """The same rows with room for longer contexts or more stop tokens."""
    wider = make_columns(max_rows=columns.num_tokens.size, max_context=max_context, max_stops=max_stops)
    pairs: Iterator[tuple[NDArray[Any], NDArray[Any]]] = zip(columns, wider, strict=True)
    for old, new in pairs:
        new[tuple(slice(size) for size in old.shape)] = old
    return wider


def move_row(columns: Columns, source: int, target: int) -> None:
    """Copies a row over another one."""
    num_tokens = columns.num_tokens[source]
    for column in columns:
        if column.ndim == 2 and column is not columns.stop_tokens:
            column[target, :num_tokens] = column[source, :num_tokens]
        else:
            column[target] = column[source]


@njit(cache=True, nogil=True)
def plan_pass(columns: Columns, num_rows: int, max_prefill: int, drafts: TokenIds, draft_offsets: Int64Array) -> Work:
    """The tokens of the next pass over rows 0 to num_rows - 1.

    A row that lacks one token computes it and its drafts, and is sampled behind each; one that lacks more takes what
    `max_prefill` leaves for it, and is sampled once nothing is left.
    """
    size = num_rows + max_prefill + drafts.size
    tokens, positions, slots = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    prefix_start, num_prefix = np.empty(size, np.int64), np.empty(size, np.int64)
    own_start, num_own, wanted = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    rows, first_logits = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)
    num_fed = np.zeros(num_rows, np.int64)
    at = num_wanted = num_sampled = 0
    for row in range(num_rows):
        missing = columns.num_tokens[row] - columns.num_computed[row]
        if not columns.is_ready[row] or (missing > 1 and max_prefill == 0):
            continue
        num_fed[row] = missing if missing == 1 else min(missing, max_prefill)
        max_prefill -= num_fed[row] if missing > 1 else 0
        num_drafts = draft_offsets[row + 1] - draft_offsets[row]
        is_sampled = num_fed[row] == missing
        if is_sampled:
            rows[num_sampled], first_logits[num_sampled] = row, num_wanted
            num_sampled += 1
        for step in range(num_fed[row] + num_drafts):
            position = columns.num_computed[row] + step
            is_draft = step >= num_fed[row]
            tokens[at] = drafts[draft_offsets[row] + step - num_fed[row]] if is_draft else columns.tokens[row, position]
            positions[at] = position
            prefix_start[at], num_prefix[at] = columns.prefix_start[row], columns.num_prefix[row]
            own_start[at], num_own[at] = columns.own_start[row], position - columns.num_prefix[row] + 1
            slots[at] = own_start[at] + num_own[at] - 1
            if is_sampled and step >= num_fed[row] - 1:
                wanted[num_wanted] = at
                num_wanted += 1
            at += 1
    return Work(
        tokens[:at],
        positions[:at],
        slots[:at],
        prefix_start[:at],
        num_prefix[:at],
        own_start[:at],
        num_own[:at],
        wanted[:num_wanted],
        rows[:num_sampled],
        first_logits[:num_sampled],
        num_fed,
    )


@njit(cache=True, nogil=True)
def take_gains(
    columns: Columns,
    work: Work,
    version: int,
    tokens: NDArray[np.int32],
    logprobs: NDArray[np.float64],
    policy_logprobs: NDArray[np.float64],
    num_out: Int64Array,
) -> Gains:
    """Appends what was sampled, [W', 1 + drafts] for the W' sampled rows, up to the first stop token or the limit.

    Every sampled token but the last has been computed as a draft, so only the last one is missing in the arena.
    """
    num_sampled = work.rows.size
    num_new, num_accepted = np.zeros(num_sampled, np.int64), np.zeros(num_sampled, np.int64)
    finish = np.zeros(num_sampled, np.int64)
    for row in range(work.num_fed.size):
        columns.num_computed[row] += work.num_fed[row]
    for index in range(num_sampled):
        row = work.rows[index]
        while num_new[index] < num_out[index] and finish[index] == NOT_FINISHED:
            token = tokens[index, num_new[index]]
            at = columns.num_tokens[row]
            column = at - columns.num_prompt[row]
            columns.tokens[row, at] = token
            columns.logprobs[row, column] = logprobs[index, num_new[index]]
            columns.policy_logprobs[row, column] = policy_logprobs[index, num_new[index]]
            columns.versions[row, column] = version
            columns.was_sampled[row, column] = True
            columns.num_tokens[row] += 1
            num_new[index] += 1
            if columns.num_tokens[row] >= columns.limit[row]:
                finish[index] = OUT_OF_ROOM
            for stop in columns.stop_tokens[row]:
                if stop == token:
                    finish[index] = STOPPED
        num_accepted[index] = min(num_new[index], num_out[index] - 1)
        columns.num_computed[row] = columns.num_tokens[row] - 1
    return Gains(num_new, num_accepted, finish)
