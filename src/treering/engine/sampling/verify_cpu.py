"""Verifies draft trees on the CPU, compiled: samples the next tokens of every rollout down its tree.

numba's cache does not notice changes in `sample_cpu`.

    T rows of logits   B rollouts   D draft tokens   K max tokens per rollout   V vocabulary
    M rows of contexts   L longest context
"""

import numpy as np

from treering.arrays import BoolArray, Float64Array, Int32Array, Int64Array
from treering.compiling.lean import kernel, lean
from treering.engine.sampling.sample_cpu import Logits, penalise, policy_logprob, sample_row, state_of


@lean
def child(token: int, number: int, num_drafts: int, drafts: Int32Array, parents: Int32Array, first: int) -> int:
    """The child of draft `number` (-1: the context) that equals `token`; -1 if there is none.

    The row's drafts are entries first .. first + num_drafts - 1.
    """
    for other in range(number + 1, num_drafts):
        if parents[first + other] == number and drafts[first + other] == token:
            return other
    return -1


def verify(
    logits: Logits,
    first_row: Int64Array,
    num_drafts: Int64Array,
    drafts: Int32Array,
    parents: Int32Array,
    draft_offsets: Int64Array,
    keys: Int64Array,
    positions: Int64Array,
    temperature: Float64Array,
    top_k: Int64Array,
    top_p: Float64Array,
    log_min_p: Float64Array,
    penalty: Float64Array,
    contexts: Int32Array,
    rows: Int64Array,
    tokens_out: Int32Array,
    logprobs_out: Float64Array,
    policy_out: Float64Array,
    num_out: Int64Array,
    path_out: Int32Array,
) -> int:
    """Samples the next tokens of every rollout: its accepted drafts and one more.

    Rollout b owns the logits rows first_row[b] .. first_row[b] + num_drafts[b]: the first follows its context, row 1 +
    j its draft j. Sampling walks down the tree: each token is sampled with the noise of its position, independent of
    the branch; the walk continues at the child that equals it and stops if there is none. So each token is that of
    `reference.sample`, whatever was drafted, and rows off the path are not read. A penalty counts the tokens of the
    context and of the path, which are sampled tokens, so drafts do not change it. Runs without the interpreter lock.

    Args:
        logits: float32 or float64 [T, V], before temperature; rows contiguous.
        first_row: int64 [B].
        num_drafts: int64 [B], 0 without drafts.
        drafts: int32 [D], of all rollouts one after another.
        parents: int32 [D], index of each token's parent within the rollout's drafts, smaller than its own; -1 for none.
        draft_offsets: int64 [B] or longer; b's drafts start at draft_offsets[b].
        keys: int64 [B], from `row_key`.
        positions: int64 [B], absolute position of the first sampled token.
        temperature: float64 [B], > 0.
        top_k: int64 [B], 0 is all.
        top_p: float64 [B], in (0, 1].
        log_min_p: float64 [B], -inf is all.
        penalty: float64 [B], of repeated tokens; 1 is none.
        contexts: int32 [M, L], prompts and rollouts so far; read only for rollouts with a penalty.
        rows: int64 [B]; b's context is the first positions[b] tokens of contexts[rows[b]].
        tokens_out: int32 [B, K], written; K > every entry of num_drafts.
        logprobs_out: float64 [B, K], written.
        policy_out: float64 [B, K], written.
        num_out: int64 [B], written: accepted drafts + 1.
        path_out: int32 [B, K], written: indices of the accepted drafts, then -1.

    Returns:
        -1, or the first b with invalid logits in a sampled row (NaN, +inf, or -inf only): raise `reference.diverged`.

    Example: drafts [4, 5] with parents [-1, 0] and samples 4, then 9 give tokens_out [4, 9], num_out 2 and path_out
    [0, -1]; the third row is not read. With 9 drafted too, and parents [-1, 0, 0], a third token is sampled from the
    fourth row, and the path is [0, 2].
    """
    rules = first_row, num_drafts, drafts, parents, draft_offsets, keys, positions, temperature, top_k, top_p, log_min_p
    outputs = tokens_out, logprobs_out, policy_out, num_out, path_out
    vocab_size = logits.shape[1]
    ids, weights = np.empty(vocab_size, np.int64), np.empty(vocab_size)
    ones = np.ones(vocab_size if top_k.any() else 0)
    nothing = np.empty(0, logits.dtype), ids[:0], np.empty(0, np.bool_)
    failed = {_verify(logits, False, *rules, penalty, contexts, rows, ids, weights, ones, *nothing, *outputs)}
    if (penalty != 1).any():
        # Logits with a penalty are no longer float32.
        wide, seen = logits.astype(np.float64, copy=False), (np.empty(vocab_size, np.int64), np.zeros(vocab_size, bool))
        penalised = np.empty(vocab_size)
        failed.add(_verify(wide, True, *rules, penalty, contexts, rows, ids, weights, ones, penalised, *seen, *outputs))
    return min(failed - {-1}, default=-1)


@kernel
def _verify(
    logits: Logits, is_penalised: bool, first_row: Int64Array, num_drafts: Int64Array, drafts: Int32Array,
    parents: Int32Array, draft_offsets: Int64Array, keys: Int64Array, positions: Int64Array, temperature: Float64Array,
    top_k: Int64Array, top_p: Float64Array, log_min_p: Float64Array, penalty: Float64Array, contexts: Int32Array,
    rows: Int64Array, ids: Int64Array, weights: Float64Array, ones: Float64Array, penalised: Logits, seen: Int64Array,
    is_seen: BoolArray, tokens_out: Int32Array, logprobs_out: Float64Array, policy_out: Float64Array,
    num_out: Int64Array, path_out: Int32Array,
) -> int:  # fmt: skip
    """`verify` of the rollouts with a penalty, or of those without; the arrays after `rows` are its scratch."""
    for b in range(first_row.size):
        if (penalty[b] != 1) != is_penalised:
            continue
        number, depth, num_seen = -1, 0, 0
        if is_penalised:
            for at in range(positions[b]):
                num_seen = _note(contexts[rows[b], at], seen, is_seen, num_seen)
        while True:
            state = state_of(keys[b], positions[b] + depth)
            own = row = logits[first_row[b] + 1 + number]
            if is_penalised:
                penalise(own, seen[:num_seen], penalty[b], penalised)
                row = penalised
            token, logprob, policy = sample_row(
                row, state, temperature[b], top_k[b], top_p[b], log_min_p[b], ids, weights, ones
            )
            if token == -1:
                return b
            if is_penalised:
                policy = policy_logprob(own, token, temperature[b], weights)
                num_seen = _note(token, seen, is_seen, num_seen)
            tokens_out[b, depth], logprobs_out[b, depth], policy_out[b, depth] = token, logprob, policy
            number = child(token, number, num_drafts[b], drafts, parents, draft_offsets[b])
            path_out[b, depth] = number
            depth += 1
            if number == -1:
                break
        num_out[b] = depth
        for i in range(num_seen):
            is_seen[seen[i]] = False
    return -1


@lean
def _note(token: int, seen: Int64Array, is_seen: BoolArray, num_seen: int) -> int:
    """Adds a token to those that were seen, unless it is there or beyond the vocabulary; returns their number."""
    if token >= is_seen.size or is_seen[token]:
        return num_seen
    is_seen[token] = True
    seen[num_seen] = token
    return num_seen + 1
