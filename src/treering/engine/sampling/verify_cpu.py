"""Verifies draft trees on the CPU, compiled: samples the next tokens of every rollout down its tree.

numba's cache does not notice changes in `sample_cpu`.

    T rows of logits   B rollouts   D draft tokens   K max tokens per rollout   V vocabulary
"""

import numpy as np
from numba import njit

from treering.arrays import Float64Array, Int32Array, Int64Array
from treering.engine.sampling.sample_cpu import Logits, sample_row, state_of


@njit(cache=True, nogil=True)
def child(token: int, number: int, num_drafts: int, drafts: Int32Array, parents: Int32Array, first: int) -> int:
    """The child of draft `number` (-1: the context) that equals `token`; -1 if there is none.

    The row's drafts are entries first .. first + num_drafts - 1.
    """
    for other in range(number + 1, num_drafts):
        if parents[first + other] == number and drafts[first + other] == token:
            return other
    return -1


@njit(cache=True, nogil=True)
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
    `reference.sample`, whatever was drafted, and rows off the path are not read. Runs without the interpreter lock.

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
    vocab_size = logits.shape[1]
    ids, weights = np.empty(vocab_size, np.int64), np.empty(vocab_size)
    ones = np.ones(vocab_size if top_k.any() else 0)
    for b in range(first_row.size):
        number, depth = -1, 0
        while True:
            state = state_of(keys[b], positions[b] + depth)
            row = logits[first_row[b] + 1 + number]
            token, logprob, policy = sample_row(row, state, temperature[b], top_k[b], top_p[b], ids, weights, ones)
            if token == -1:
                return b
            tokens_out[b, depth], logprobs_out[b, depth], policy_out[b, depth] = token, logprob, policy
            number = child(token, number, num_drafts[b], drafts, parents, draft_offsets[b])
            path_out[b, depth] = number
            depth += 1
            if number == -1:
                break
        num_out[b] = depth
    return -1
