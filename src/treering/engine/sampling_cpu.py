"""Drawing and verifying tokens on the CPU: the specification of `sampling`, compiled, a few passes over the logits.

Knows rows of logits, keys and chain drafts. Gives the tokens of `sampling.sample`, and its log-probabilities up to
rounding (some 1e-15). Everything stands in this file because numba's cache of a function does not notice changes in
other files.

    T rows of logits   B rollouts   D drafted tokens   K tokens per rollout at most   V vocabulary
"""

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treering.engine.noise import MIX_FACTORS, MIX_SHIFTS, NUM_DROPPED_BITS, POSITION_STEP, TOKEN_STEP
from treering.engine.sampling import MASS_SLACK

Logits = NDArray[np.float32] | NDArray[np.float64]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]

# Typed, because numba turns uint64 times int64 into a float.
_POSITION_STEP, _TOKEN_STEP = np.uint64(POSITION_STEP), np.uint64(TOKEN_STEP)
_FACTOR_1, _FACTOR_2 = np.uint64(MIX_FACTORS[0]), np.uint64(MIX_FACTORS[1])
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(MIX_SHIFTS[0]), np.uint64(MIX_SHIFTS[1]), np.uint64(MIX_SHIFTS[2])
_DROPPED = np.uint64(NUM_DROPPED_BITS)
_RESOLUTION = 2.0 ** (NUM_DROPPED_BITS - 64)

_LOG2_E = 1.0 / math.log(2.0)
# log 2 in two parts, the first with 20 trailing zero bits, so that its product with an exponent is exact.
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
# Adding it rounds to an integer, which then stands in the lowest bits.
_ROUNDER = 1.5 * 2.0**52
_EXPONENT_BIAS, _MANTISSA_BITS = np.int64(1023), np.int64(52)
# Below it exp leaves the normal numbers, and no noise lifts so small a weight above the top one.
_LEAST_EXPONENT = -708.0
_TAYLOR = tuple(1.0 / math.factorial(n) for n in range(14))

_BLOCK = 64
# Widens the bound of the race by more than the rounding of log, product and quotient.
_ROUNDING_SLACK = 1.0 - 1e-14
_LEAST_CANDIDATES = 64


@njit(cache=True, inline="always")
def _mix(bits: np.uint64) -> np.uint64:
    bits = (bits ^ (bits >> _SHIFT_1)) * _FACTOR_1
    bits = (bits ^ (bits >> _SHIFT_2)) * _FACTOR_2
    return bits ^ (bits >> _SHIFT_3)


@njit(cache=True, inline="always")
def _uniform(state: np.uint64, token: int) -> float:
    bits = _mix(state + np.uint64(token) * _TOKEN_STEP)
    return (np.float64(np.int64(bits >> _DROPPED)) + 0.5) * _RESOLUTION


@njit(cache=True, nogil=True)
def uniforms(key: int, position: int, vocab_size: int) -> Float64Array:
    """`noise.uniforms`, bit for bit: float64 [V]."""
    state = _mix(np.uint64(key) + np.uint64(position) * _POSITION_STEP)
    out = np.empty(vocab_size)
    for token in range(vocab_size):
        out[token] = _uniform(state, token)
    return out


@njit(cache=True, inline="always")
def _exp(x: float) -> float:
    """The exponential of x <= 0, within 2e-16 relative; NaN stays NaN. No branch, no call: loops vectorise."""
    rounded = x * _LOG2_E + _ROUNDER
    exponent = rounded - _ROUNDER
    r = (x - exponent * _LN2_HIGH) - exponent * _LN2_LOW
    y = _TAYLOR[13]
    for n in range(12, -1, -1):
        y = y * r + _TAYLOR[n]
    power = np.int64((np.float64(rounded).view(np.int64) + _EXPONENT_BIAS) << _MANTISSA_BITS).view(np.float64)
    return 0.0 if x < _LEAST_EXPONENT else y * power


# error_model: numba's default tests every divisor for zero.
@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def _weigh(row: Logits, top: float, temperature: float, weights: Float64Array) -> None:
    """Probabilities over that of the top token."""
    for i in range(row.size):
        weights[i] = _exp((np.float64(row[i]) - top) / temperature)


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def _total(weights: Float64Array) -> float:
    total = 0.0
    for i in range(weights.size):
        total += weights[i]
    return total


@njit(cache=True, inline="always")
def _may_win(weight: float, u: float, best: float) -> bool:
    """False only where weight / -log(u) is below `best`: -log(u) is never below 1 - u."""
    return weight >= best * (1.0 - u) * _ROUNDING_SLACK


@njit(cache=True, nogil=True)
def _race(ids: Int64Array, weights: Float64Array, state: np.uint64) -> int:
    """The id among `ids` with the greatest weight / -log(u)."""
    winner, best = -1, 0.0
    for at in range(ids.size):
        token = ids[at]
        u = _uniform(state, token)
        if _may_win(weights[token], u, best):
            score = weights[token] / -math.log(u)
            if score > best or (score == best and token < winner):
                winner, best = token, score
    return winner


@njit(cache=True, nogil=True)
def _race_of_all(weights: Float64Array, likeliest: int, state: np.uint64) -> int:
    """`_race` of the whole vocabulary. A logarithm is taken for the few that may beat the best so far."""
    winner = likeliest
    best = weights[winner] / -math.log(_uniform(state, winner))
    for start in range(0, weights.size, _BLOCK):
        stop = min(start + _BLOCK, weights.size)
        num_candidates = 0
        for token in range(start, stop):
            num_candidates += int(_may_win(weights[token], _uniform(state, token), best))
        if num_candidates == 0:
            continue
        for token in range(start, stop):
            u = _uniform(state, token)
            if _may_win(weights[token], u, best):
                score = weights[token] / -math.log(u)
                if score > best or (score == best and token < winner):
                    winner, best = token, score
    return winner


@njit(cache=True, nogil=True)
def _select(row: Logits, ids: Int64Array, amounts: Float64Array, reach: float) -> int:
    """Moves the ids with an amount below `reach` before them to the front, and counts them (quickselect).

    Ids rank by logit, of equal ones the smaller first.
    """
    low, high, before = 0, ids.size, 0.0
    while low < high:
        middle = (low + high) // 2
        pivot = ids[middle]
        ids[middle] = ids[high - 1]
        at, amount = low, 0.0
        for i in range(low, high - 1):
            token = ids[i]
            if row[token] > row[pivot] or (row[token] == row[pivot] and token < pivot):
                ids[i], ids[at] = ids[at], token
                at += 1
                amount += amounts[token]
        ids[high - 1] = ids[at]
        ids[at] = pivot
        if before + amount < reach:
            low = at + 1
            before += amount + amounts[pivot]
        else:
            high = at
    return low


@njit(cache=True, nogil=True)
def _largest(row: Logits, k: int, ids: Int64Array, ones: Float64Array) -> int:
    """Fills the front of `ids` with the k largest logits, and counts them: fewer than k only for hidden tokens.

    Candidates above the k-th largest so far are collected and, when there are twice too many, thinned out.
    """
    num_ids, floor = 0, -np.inf
    capacity = max(2 * k, _LEAST_CANDIDATES)
    for token in range(row.size):
        # An equal logit with a larger id ranks behind all of the k.
        if row[token] <= floor:
            continue
        ids[num_ids] = token
        num_ids += 1
        if num_ids == capacity:
            num_ids = _select(row, ids[:num_ids], ones, k)
            floor = np.inf
            for at in range(num_ids):
                floor = min(floor, np.float64(row[ids[at]]))
    num_kept: int = _select(row, ids[:num_ids], ones, k)
    return num_kept


@njit(cache=True, nogil=True)
def _likely(row: Logits, ids: Int64Array, weights: Float64Array, total: float, top_p: float) -> int:
    """Moves the ids whose mass reaches `top_p` of `total` to the front, and counts them."""
    # All tokens below it have less than 1 - top_p together, so what ranks above them has reached top_p.
    least = (1.0 - top_p) * total / ids.size
    num_ids = 0
    for at in range(ids.size):
        token = ids[at]
        ids[num_ids] = token
        num_ids += int(weights[token] >= least)
    num_kept: int = _select(row, ids[:num_ids], weights, max(top_p - MASS_SLACK, MASS_SLACK) * total)
    return num_kept


@njit(cache=True, nogil=True)
def _total_of(ids: Int64Array, weights: Float64Array) -> float:
    total = 0.0
    for at in range(ids.size):
        total += weights[ids[at]]
    return total


@njit(cache=True, nogil=True)
def _keep(row: Logits, ids: Int64Array, weights: Float64Array, ones: Float64Array, top_k: int, top_p: float) -> int:
    """Moves the ids that can be drawn to the front, and counts them."""
    num_ids = row.size
    if 0 < top_k < num_ids:
        num_ids = _largest(row, top_k, ids, ones)
    else:
        for token in range(num_ids):
            ids[token] = token
    if top_p < 1.0:
        num_ids = _likely(row, ids[:num_ids], weights, _total_of(ids[:num_ids], weights), top_p)
    return num_ids


@njit(cache=True, nogil=True, error_model="numpy")
def _draw(
    row: Logits,
    state: np.uint64,
    temperature: float,
    top_k: int,
    top_p: float,
    ids: Int64Array,
    weights: Float64Array,
    ones: Float64Array,
) -> tuple[int, float, float]:
    """Token, log-probability and policy log-probability of one row; token -1 where the logits are no distribution."""
    likeliest = 0
    for token in range(row.size):
        if row[token] > row[likeliest]:
            likeliest = token
    top = np.float64(row[likeliest])
    _weigh(row, top, temperature, weights)
    total = _total(weights)
    # A NaN anywhere, +inf - inf and -inf - -inf all end here.
    if math.isnan(total):
        return -1, 0.0, 0.0
    if top_p >= 1.0 and (top_k == 0 or top_k >= row.size):
        token, kept = _race_of_all(weights, likeliest, state), total
    else:
        num_ids = _keep(row, ids, weights, ones, top_k, top_p)
        token, kept = _race(ids[:num_ids], weights, state), _total_of(ids[:num_ids], weights)
    scaled = (np.float64(row[token]) - top) / temperature
    return token, scaled - math.log(kept), scaled - math.log(total)


@njit(cache=True, nogil=True)
def verify(
    logits: Logits,
    first_row: Int64Array,
    num_drafts: Int64Array,
    drafts: Int32Array,
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
) -> int:
    """Draws the next tokens of every rollout: as many of its drafts as agree, and one more.

    Rollout b owns the logits rows first_row[b] .. first_row[b] + num_drafts[b]: the j-th follows its j-th draft and
    gives the token at positions[b] + j. Drawing stops behind the first token that is not the draft of its place, so
    each token is one of `sampling.sample`, whatever was drafted. Runs without the interpreter lock.

    Args:
        logits: float32 or float64 [T, V], before temperature; rows contiguous.
        first_row: int64 [B].
        num_drafts: int64 [B], 0 where nothing was drafted.
        drafts: int32 [D], of all rollouts one after another.
        draft_offsets: int64 [B] or longer; b's drafts start at draft_offsets[b].
        keys: int64 [B], from `row_key`.
        positions: int64 [B], absolute position of the first token that is drawn.
        temperature: float64 [B], > 0.
        top_k: int64 [B], 0 is all.
        top_p: float64 [B], in (0, 1].
        tokens_out: int32 [B, K], written; K > every entry of num_drafts.
        logprobs_out: float64 [B, K], written.
        policy_out: float64 [B, K], written.
        num_out: int64 [B], written: accepted drafts + 1.

    Returns:
        -1, or the first b with a drawn row that is no distribution (NaN, +inf, or -inf alone): raise
        `sampling.diverged`.

    Example: drafts [4, 5] where the draws are 4, then 9 give tokens_out [4, 9] and num_out 2; the third row is not
    drawn.
    """
    vocab_size = logits.shape[1]
    ids, weights = np.empty(vocab_size, np.int64), np.empty(vocab_size)
    ones = np.ones(vocab_size if top_k.any() else 0)
    for b in range(first_row.size):
        for j in range(num_drafts[b] + 1):
            state = _mix(np.uint64(keys[b]) + np.uint64(positions[b] + j) * _POSITION_STEP)
            row = logits[first_row[b] + j]
            token, logprob, policy = _draw(row, state, temperature[b], top_k[b], top_p[b], ids, weights, ones)
            if token == -1:
                return b
            tokens_out[b, j], logprobs_out[b, j], policy_out[b, j] = token, logprob, policy
            num_out[b] = j + 1
            if j < num_drafts[b] and token != drafts[draft_offsets[b] + j]:
                break
    return -1
