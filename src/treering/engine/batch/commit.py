"""Appends a step's sampled tokens to the running rollouts, up to the first stop token or the length limit.

It also plans the moves of accepted drafts' keys and values to their final slots.

    B running rows   R sampled rows   J most drafts of a row   K slots that move
"""

from typing import NamedTuple

import numpy as np

from treering.arrays import BoolArray, Float64Array, Int32Array, Int64Array
from treering.compiling.lean import kernel, lean
from treering.engine.batch.draft_tree import DraftTrees
from treering.engine.batch.state import BatchState, StepInputs

NOT_FINISHED, STOPPED, REACHED_LIMIT = 0, 1, 2


class CommittedTokens(NamedTuple):
    """Counts for the R sampled rows (in the order of `StepInputs.rows`), for all B rows, and K key-value moves."""

    num_new: Int64Array  # [R] tokens appended
    finish: Int64Array  # [R] NOT_FINISHED, STOPPED or REACHED_LIMIT
    num_accepted: Int64Array  # [B] draft tokens among the appended ones
    leaves: Int64Array  # [B] index of the last accepted draft within its row, -1 for none
    sources: Int64Array  # [K] slots of accepted tokens to copy from, as `Decoder.move` takes them
    targets: Int64Array  # [K] slots to copy their keys and values to


def commit_tokens(
    columns: BatchState,
    inputs: StepInputs,
    version: int,
    tokens: Int32Array,
    logprobs: Float64Array,
    policy_logprobs: Float64Array,
    num_out: Int64Array,
    path: Int32Array,
) -> CommittedTokens:
    """Appends the sampled tokens, [R, 1 + J] for the R sampled rows, up to the first stop token or the limit.

    Every sampled token but the last was computed as draft path[r, i] of its row, so only the last one is missing in
    the arena. A row needs its accepted drafts in consecutive slots, a finished one too, because it may be branched; few
    have to move, because a draft's likeliest path comes first. A duplicate row needs all that its leader computed
    copied into its own span.
    """
    c = columns
    # Few arrays: numba unpacks each argument, which takes longer than filling it.
    sampled, every = np.zeros((2, inputs.rows.size), np.int64), np.zeros((2, inputs.num_fed.size), np.int64)
    moves = np.empty((2, path.size), np.int64)
    num_moves = _append(
        c.tokens, c.logprobs, c.policy_logprobs, c.versions, c.was_sampled, c.num_tokens, c.num_computed, c.num_prompt,
        c.num_prefix, c.own_start, c.limit, c.stop_tokens, inputs.rows, inputs.leaders, inputs.num_fed, version, tokens,
        logprobs, policy_logprobs, num_out, path, sampled, every, moves,
    )  # fmt: skip
    return CommittedTokens(*sampled, *every, *moves[:, :num_moves])


@kernel
def _append(
    context: Int32Array,
    all_logprobs: Float64Array,
    all_policy_logprobs: Float64Array,
    versions: Int32Array,
    was_sampled: BoolArray,
    num_tokens: Int64Array,
    num_computed: Int64Array,
    num_prompt: Int64Array,
    num_prefix: Int64Array,
    own_start: Int64Array,
    limit: Int64Array,
    stop_tokens: Int32Array,
    rows: Int64Array,
    leaders: Int64Array,
    num_fed: Int64Array,
    version: int,
    tokens: Int32Array,
    logprobs: Float64Array,
    policy_logprobs: Float64Array,
    num_out: Int64Array,
    path: Int32Array,
    sampled: Int64Array,
    every: Int64Array,
    moves: Int64Array,
) -> int:
    """Fills `CommittedTokens`: sampled [2, R] and every [2, B] (both zeros) and moves [2, >= K]; returns K."""
    num_new, finish, num_accepted, leaves = sampled[0], sampled[1], every[0], every[1]
    for row in range(num_fed.size):
        num_computed[row] += num_fed[row]
        leaves[row] = -1
    for index in range(rows.size):
        row = rows[index]
        while num_new[index] < num_out[index] and finish[index] == NOT_FINISHED:
            token = tokens[index, num_new[index]]
            at = num_tokens[row]
            column = at - num_prompt[row]
            context[row, at] = token
            all_logprobs[row, column] = logprobs[index, num_new[index]]
            all_policy_logprobs[row, column] = policy_logprobs[index, num_new[index]]
            versions[row, column] = version
            was_sampled[row, column] = True
            num_tokens[row] += 1
            num_new[index] += 1
            if num_tokens[row] >= limit[row]:
                finish[index] = REACHED_LIMIT
            for stop in stop_tokens[row]:
                if stop == token:
                    finish[index] = STOPPED
        num_computed[row] = num_tokens[row] - 1
        # The last one is sampled, not computed, also where the row ends inside its leader's draft.
        num_accepted[row] = num_new[index] - 1
        if num_accepted[row] > 0:
            leaves[row] = path[index, num_accepted[row] - 1]
    num_moves: int = _plan_moves(num_tokens, num_prefix, own_start, rows, leaders, num_new, num_accepted, path, moves)
    return num_moves


@lean
def _plan_moves(
    num_tokens: Int64Array,
    num_prefix: Int64Array,
    own_start: Int64Array,
    rows: Int64Array,
    leaders: Int64Array,
    num_new: Int64Array,
    num_accepted: Int64Array,
    path: Int32Array,
    moves: Int64Array,
) -> int:
    """Fills the key-value moves of the rows; returns their number.

    Copies into duplicate rows come first: the leader's own moves overwrite slots that they read.
    """
    num_moves = 0
    for is_duplicate in (True, False):
        for index in range(rows.size):
            row, leader = rows[index], leaders[index]
            if (leader != row) != is_duplicate:
                continue
            # Offset in either span of the first slot after the tokens that the pass began with.
            offset = num_tokens[row] - num_new[index] - num_prefix[row]
            source, target = own_start[leader] + offset, own_start[row] + offset
            if is_duplicate:
                moves[0, num_moves], moves[1, num_moves] = source - 1, target - 1
                num_moves += 1
            for step in range(num_accepted[row]):
                if source + path[index, step] != target + step:
                    moves[0, num_moves], moves[1, num_moves] = source + path[index, step], target + step
                    num_moves += 1
    return num_moves


def counts_of(inputs: StepInputs, committed: CommittedTokens, drafts: DraftTrees, num_prefilled: int) -> dict[str, int]:
    """A step's increments of `EngineStats`, by field; `num_prefilled` counts the chunks of shared prompts."""
    num_drafted = int((drafts.offsets[inputs.leaders + 1] - drafts.offsets[inputs.leaders]).sum())
    # For a few numbers, summing a list is faster than summing an array.
    return {
        "num_forwards": 1,
        "num_rows": inputs.rows.size,
        "num_sampled": sum(committed.num_new.tolist()),
        "num_prefilled": num_prefilled + sum(inputs.num_fed.tolist()) - inputs.rows.size,
        "num_drafted": num_drafted,
        "num_duplicate_rows": int((inputs.leaders != inputs.rows).sum()),
        "num_accepted": sum(committed.num_accepted.tolist()),
    }
