"""What stands between the matrix products of a decoder on CPU, each as one compiled loop without the interpreter lock.

Knows numbers only. All float arrays of a call have one dtype, float32 or float64, and the loops compute in it.

    T tokens   C hidden size   F MLP size   H query heads   G key-value heads   D head size   S slots   P positions
    K longest view of a token
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Ints = NDArray[np.int64]

# Sums may be reordered into vectors; NaN and infinity keep their meaning, so that diverged weights are seen.
_FAST = {"reassoc", "contract", "arcp", "nsz"}


class Scratch(NamedTuple):
    """Constants and room for one thread; made by `make_scratch`."""

    constants: Floats  # [6] 1 / ln 2, ln 2 in two parts, smallest and largest argument, 1 / 2
    series: Floats  # [14] Taylor coefficients of e**x
    exponents: NDArray[np.signedinteger]  # [2] bias, mantissa bits
    bits: NDArray[np.signedinteger]  # [K or F] integers that `powers` reads as floats
    powers: Floats
    scores: Floats  # [K or F]


# First part of ln 2 with so few bits that whole multiples of it are exact.
_LN2_HIGH = {4: 0.693359375, 8: 0.6931471803691238}
_LN2_LOW = {4: -0.00021219444005469058, 8: 1.9082149292705877e-10}


def make_scratch(dtype: np.dtype, size: int) -> Scratch:
    """Room for rows of up to `size` numbers of float32 or float64."""
    info, ln2 = np.finfo(dtype), math.log(2)
    integer = np.dtype(f"i{dtype.itemsize}")
    bits = np.zeros(size, integer)
    parts = _LN2_HIGH[dtype.itemsize], _LN2_LOW[dtype.itemsize]
    return Scratch(
        constants=np.array([1 / ln2, *parts, info.minexp * ln2, (info.maxexp - 2) * ln2, 0.5], dtype),
        series=np.array([1 / math.factorial(order) for order in range(14)], dtype),
        exponents=np.array([info.maxexp - 1, info.nmant], integer),
        bits=bits,
        powers=bits.view(dtype),
        scores=np.zeros(size, dtype),
    )


@njit(cache=True, nogil=True, fastmath=_FAST)
def rms_norm(x: Floats, weight: Floats, eps: Floats, out: Floats) -> None:
    """Row by row, weight * x / sqrt(mean(x**2) + eps) into `out`, for x [T, C]; eps is [1]."""
    num_columns = x.shape[1]
    count = eps.dtype.type(num_columns)
    for t in range(x.shape[0]):
        total = x[t, 0] * x[t, 0]
        for c in range(1, num_columns):
            total += x[t, c] * x[t, c]
        scale = np.sqrt(total / count + eps[0])
        for c in range(num_columns):
            out[t, c] = weight[c] * (x[t, c] / scale)


@njit(cache=True, nogil=True, fastmath=_FAST)
def silu_mul(gate_up: Floats, scratch: Scratch, out: Floats) -> None:
    """Puts silu(gate) * up into `out` [T, F], for gate_up [T, 2 F] with the gates first."""
    size = out.shape[1]
    one = scratch.series[0]
    for t in range(out.shape[0]):
        for f in range(size):
            scratch.scores[f] = -gate_up[t, f]
        _exponential(scratch, size)
        for f in range(size):
            out[t, f] = gate_up[t, f] / (one + scratch.scores[f]) * gate_up[t, size + f]


@njit(cache=True, nogil=True, fastmath=_FAST)
def write_keys(
    qkv: Floats,
    q_norm: Floats,
    k_norm: Floats,
    eps: Floats,
    cos: Floats,
    sin: Floats,
    positions: Ints,
    slots: Ints,
    keys: Floats,
    values: Floats,
) -> None:
    """Norms and rotates queries and keys of qkv [T, (H + 2 G) D] in place, and puts keys and values into the arena.

    keys is [G, D, S], values [G, S, D], cos and sin [P, D]; empty norms are left out.
    """
    num_kv_heads, _, head_size = values.shape
    num_heads = qkv.shape[1] // head_size - 2 * num_kv_heads
    for t in range(qkv.shape[0]):
        at, slot = positions[t], slots[t]
        for head in range(num_heads + num_kv_heads):
            x = qkv[t, head * head_size : (head + 1) * head_size]
            norm = q_norm if head < num_heads else k_norm
            if norm.size > 0:
                _norm_head(x, norm, eps)
            _rotate(x, cos[at], sin[at])
        for g in range(num_kv_heads):
            first = (num_heads + g) * head_size
            for d in range(head_size):
                keys[g, d, slot] = qkv[t, first + d]
                values[g, slot, d] = qkv[t, first + num_kv_heads * head_size + d]


@njit(cache=True, nogil=True, fastmath=_FAST)
def attend(
    qkv: Floats,
    keys: Floats,
    values: Floats,
    prefix_start: Ints,
    num_prefix: Ints,
    own_start: Ints,
    num_own: Ints,
    scale: Floats,
    scratch: Scratch,
    out: Floats,
) -> None:
    """Attention of each token's queries over its two spans; out is [T, H D], scale [1]."""
    num_kv_heads, _, head_size = values.shape
    num_heads = out.shape[1] // head_size
    group = num_heads // num_kv_heads
    for t in range(out.shape[0]):
        num_keys = num_prefix[t] + num_own[t]
        for head in range(num_heads):
            g = head // group
            query = qkv[t, head * head_size : (head + 1) * head_size]
            result = out[t, head * head_size : (head + 1) * head_size]
            for d in range(head_size):
                query[d] *= scale[0]
            _score(query, keys[g], prefix_start[t], num_prefix[t], scratch.scores, 0)
            _score(query, keys[g], own_start[t], num_own[t], scratch.scores, num_prefix[t])
            total = _soften(scratch, num_keys)
            result[:] = 0
            _gather(values[g], prefix_start[t], num_prefix[t], scratch.scores, 0, result)
            _gather(values[g], own_start[t], num_own[t], scratch.scores, num_prefix[t], result)
            for d in range(head_size):
                result[d] /= total


@njit(cache=True, nogil=True, fastmath=_FAST, inline="always")
def _norm_head(x: Floats, weight: Floats, eps: Floats) -> None:
    total = x[0] * x[0]
    for d in range(1, x.size):
        total += x[d] * x[d]
    scale = np.sqrt(total / eps.dtype.type(x.size) + eps[0])
    for d in range(x.size):
        x[d] = weight[d] * (x[d] / scale)


@njit(cache=True, nogil=True, fastmath=_FAST, inline="always")
def _rotate(x: Floats, cos: Floats, sin: Floats) -> None:
    half = x.size // 2
    for d in range(half):
        first, second = x[d], x[half + d]
        x[d] = first * cos[d] - second * sin[d]
        x[half + d] = second * cos[half + d] + first * sin[half + d]


@njit(cache=True, nogil=True, fastmath=_FAST)
def _score(query: Floats, keys: Floats, start: int, count: int, scores: Floats, offset: int) -> None:
    """Puts query . keys[:, start + j] into scores[offset + j]; keys is [D, S], so that the loop over j is a vector."""
    row = scores[offset : offset + count]
    row[:] = 0
    num_blocked = query.size // 4 * 4
    for d in range(0, num_blocked, 4):
        q0, q1, q2, q3 = query[d], query[d + 1], query[d + 2], query[d + 3]
        k0 = keys[d, start : start + count]
        k1 = keys[d + 1, start : start + count]
        k2 = keys[d + 2, start : start + count]
        k3 = keys[d + 3, start : start + count]
        for j in range(count):
            row[j] += q0 * k0[j] + q1 * k1[j] + q2 * k2[j] + q3 * k3[j]
    for d in range(num_blocked, query.size):
        for j in range(count):
            row[j] += query[d] * keys[d, start + j]


@njit(cache=True, nogil=True, fastmath=_FAST)
def _gather(values: Floats, start: int, count: int, weights: Floats, offset: int, result: Floats) -> None:
    """Adds to `result` the sum of weights[offset + j] * values[start + j]; values is [S, D]."""
    num_blocked = count // 4 * 4
    for j in range(0, num_blocked, 4):
        w0, w1, w2, w3 = (
            weights[offset + j],
            weights[offset + j + 1],
            weights[offset + j + 2],
            weights[offset + j + 3],
        )
        v0, v1, v2, v3 = values[start + j], values[start + j + 1], values[start + j + 2], values[start + j + 3]
        for d in range(result.size):
            result[d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
    for j in range(num_blocked, count):
        for d in range(result.size):
            result[d] += weights[offset + j] * values[start + j, d]


@njit(cache=True, nogil=True, fastmath=_FAST)
def _soften(scratch: Scratch, count: int) -> Any:
    """Turns the first scores into exp(score - largest), in place, and returns their sum."""
    scores = scratch.scores
    largest = scores[0]
    for j in range(1, count):
        largest = max(largest, scores[j])
    for j in range(count):
        scores[j] -= largest
    _exponential(scratch, count)
    total = scores[0]
    for j in range(1, count):
        total += scores[j]
    return total


@njit(cache=True, nogil=True, fastmath=_FAST)
def _exponential(scratch: Scratch, count: int) -> None:
    """Turns the first scores into their exponentials, in place.

    exp(x) = 2**n exp(r) with |r| <= ln(2) / 2. Written out because numba's own exp is a call for each number, and flat
    because a loop over the series would keep the outer one from becoming vectors (5.4 against 0.8 ns a number).
    """
    x, bits = scratch.scores, scratch.bits
    k, c = scratch.constants, scratch.series
    inverse, high, low, smallest, largest, half = k[0], k[1], k[2], k[3], k[4], k[5]
    c0, c1, c2, c3, c4, c5, c6 = c[0], c[1], c[2], c[3], c[4], c[5], c[6]
    c7, c8, c9, c10, c11, c12, c13 = c[7], c[8], c[9], c[10], c[11], c[12], c[13]
    bias, shift = scratch.exponents[0], scratch.exponents[1]
    for j in range(count):
        y = x[j]
        y = smallest if y < smallest else y
        y = largest if y > largest else y
        n = np.floor(y * inverse + half)
        bits[j] = (int(n) + bias) << shift
        r = (y - n * high) - n * low
        tail = c7 + r * (c8 + r * (c9 + r * (c10 + r * (c11 + r * (c12 + r * c13)))))
        x[j] = c0 + r * (c1 + r * (c2 + r * (c3 + r * (c4 + r * (c5 + r * (c6 + r * tail))))))
    for j in range(count):
        x[j] *= scratch.powers[j]
