"""Samples a token on the CPU: `sampling.reference` compiled to a few passes over a row of logits.

Returns the token of `reference.sample`, and its log-probabilities up to rounding (about 1e-15).

    V vocabulary
"""

import math

import numpy as np

from treering.arrays import Float32Array, Float64Array, Int64Array
from treering.engine.sampling.noise import MIX_FACTORS, MIX_SHIFTS, NUM_DROPPED_BITS, POSITION_STEP, TOKEN_STEP
from treering.engine.sampling.truncation_cpu import keep, keep_likely, total_of
from treering.lean import kernel, lean

Logits = Float32Array | Float64Array

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
# Adding it rounds to an integer, which ends up in the lowest bits.
_ROUNDER = 1.5 * 2.0**52
_EXPONENT_BIAS, _MANTISSA_BITS = np.int64(1023), np.int64(52)
# Below it exp is subnormal, and no noise lifts so small a weight above the top one.
_LEAST_EXPONENT = -708.0
_TAYLOR = tuple(1.0 / math.factorial(n) for n in range(14))

_BLOCK = 64
# Widens the bound in `_may_be_largest` by more than the rounding of log, product and quotient.
_ROUNDING_SLACK = 1.0 - 1e-14


@lean
def _mix(bits: np.uint64) -> np.uint64:
    bits = (bits ^ (bits >> _SHIFT_1)) * _FACTOR_1
    bits = (bits ^ (bits >> _SHIFT_2)) * _FACTOR_2
    return bits ^ (bits >> _SHIFT_3)


@lean
def _uniform(state: np.uint64, token: int) -> float:
    bits = _mix(state + np.uint64(token) * _TOKEN_STEP)
    return (np.float64(np.int64(bits >> _DROPPED)) + 0.5) * _RESOLUTION


@lean
def state_of(key: int, position: int) -> np.uint64:
    """The noise state at a position of a rollout; every token's uniform number derives from it."""
    state: np.uint64 = _mix(np.uint64(key) + np.uint64(position) * _POSITION_STEP)
    return state


@kernel
def fill_uniforms(key: int, position: int, out: Float64Array) -> None:
    """Writes `noise.uniforms`, bit for bit, to `out` [V]."""
    state = state_of(key, position)
    for token in range(out.size):
        out[token] = _uniform(state, token)


@lean(fastmath={"contract"})
def _exp(x: float) -> float:
    """The exponential of x <= 0, within 2e-16 relative; NaN stays NaN. No branches or calls, so loops vectorise."""
    rounded = x * _LOG2_E + _ROUNDER
    exponent = rounded - _ROUNDER
    r = (x - exponent * _LN2_HIGH) - exponent * _LN2_LOW
    y = _TAYLOR[13]
    for n in range(12, -1, -1):
        y = y * r + _TAYLOR[n]
    power = np.int64((np.float64(rounded).view(np.int64) + _EXPONENT_BIAS) << _MANTISSA_BITS).view(np.float64)
    return 0.0 if x < _LEAST_EXPONENT else y * power


@lean(inline=False, fastmath={"contract"})
def _fill_weights(row: Logits, top: float, temperature: float, weights: Float64Array) -> None:
    """Probabilities relative to the top token's."""
    for i in range(row.size):
        weights[i] = _exp((np.float64(row[i]) - top) / temperature)


@lean(inline=False, fastmath={"reassoc"})
def _total(weights: Float64Array) -> float:
    total = 0.0
    for i in range(weights.size):
        total += weights[i]
    return total


@lean
def _may_be_largest(weight: float, u: float, best: float) -> bool:
    """False only if weight / -log(u) is below `best`: uses the bound -log(u) >= 1 - u."""
    return weight >= best * (1.0 - u) * _ROUNDING_SLACK


@lean
def _gumbel_max(ids: Int64Array, weights: Float64Array, state: np.uint64) -> int:
    """The id among `ids` with the greatest weight / -log(u)."""
    winner, best = -1, 0.0
    for at in range(ids.size):
        token = ids[at]
        u = _uniform(state, token)
        if _may_be_largest(weights[token], u, best):
            score = weights[token] / -math.log(u)
            if score > best or (score == best and token < winner):
                winner, best = token, score
    return winner


@lean(inline=False)
def _gumbel_max_of_all(weights: Float64Array, likeliest: int, state: np.uint64) -> int:
    """`_gumbel_max` over the whole vocabulary; computes logarithms only for tokens that may beat the best so far."""
    winner = likeliest
    best = weights[winner] / -math.log(_uniform(state, winner))
    for start in range(0, weights.size, _BLOCK):
        stop = min(start + _BLOCK, weights.size)
        num_candidates = 0
        for token in range(start, stop):
            num_candidates += int(_may_be_largest(weights[token], _uniform(state, token), best))
        if num_candidates == 0:
            continue
        for token in range(start, stop):
            u = _uniform(state, token)
            if _may_be_largest(weights[token], u, best):
                score = weights[token] / -math.log(u)
                if score > best or (score == best and token < winner):
                    winner, best = token, score
    return winner


@lean
def sample_row(
    row: Logits,
    state: np.uint64,
    temperature: float,
    top_k: int,
    top_p: float,
    log_min_p: float,
    ids: Int64Array,
    weights: Float64Array,
    ones: Float64Array,
) -> tuple[int, float, float]:
    """Token, log-probability and policy log-probability of one row; token -1 for invalid logits."""
    likeliest = 0
    for token in range(row.size):
        if row[token] > row[likeliest]:
            likeliest = token
    top = np.float64(row[likeliest])
    _fill_weights(row, top, temperature, weights)
    total = _total(weights)
    # A NaN anywhere, +inf - inf and -inf - -inf all end here.
    if math.isnan(total):
        return -1, 0.0, 0.0
    if top_p >= 1.0 and (top_k == 0 or top_k >= row.size) and log_min_p == -np.inf:
        token, kept = _gumbel_max_of_all(weights, likeliest, state), total
    else:
        num_ids = keep(row, ids, weights, ones, top_k, top_p)
        if log_min_p > -np.inf:
            num_ids = keep_likely(row, ids[:num_ids], top, temperature, log_min_p)
        token, kept = _gumbel_max(ids[:num_ids], weights, state), total_of(ids[:num_ids], weights)
    scaled = (np.float64(row[token]) - top) / temperature
    return token, scaled - math.log(kept), scaled - math.log(total)


@lean
def policy_logprob(row: Logits, token: int, temperature: float, weights: Float64Array) -> float:
    """Log-probability of a token at the temperature alone."""
    largest = row[0]
    for at in range(1, row.size):
        largest = max(largest, row[at])
    top = np.float64(largest)
    _fill_weights(row, top, temperature, weights)
    return (np.float64(row[token]) - top) / temperature - math.log(_total(weights))


@lean
def penalise(row: Logits, seen: Int64Array, penalty: float, out: Logits) -> None:
    """Fills `out` with the row's logits, those of the distinct tokens `seen` penalised."""
    for token in range(row.size):
        out[token] = row[token]
    for i in range(seen.size):
        token = seen[i]
        out[token] = out[token] * penalty if out[token] < 0 else out[token] / penalty
