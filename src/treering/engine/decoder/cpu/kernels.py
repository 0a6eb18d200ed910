"""Compute the operations between a CPU decoder's matrix products, each as one compiled loop that releases the GIL.

All float arrays of a call have one dtype, float32 or float64, and the loops compute in it.

    T tokens   C hidden size   F MLP size   H query heads   G key-value heads   D head size
    E head size padded to whole vectors   S slots   P positions   K longest view of a token
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.arrays import Int64Array
from treering.compiling.lean import kernel, lean
from treering.compiling.once import compiled_once
from treering.engine.decoder.cpu.simd import (
    add,
    broadcast,
    broadcast_from,
    divide,
    exponential,
    lanes,
    largest,
    load,
    maximum,
    muladd,
    multiply,
    select,
    store,
    subtract,
    total,
)

Floats = NDArray[np.floating]

# Sums may be reordered for vectorisation; NaN and infinity keep their meaning, so diverged weights are detected.
FAST = {"reassoc", "contract", "arcp", "nsz"}


@compiled_once(nogil=True, no_cfunc_wrapper=True, fastmath=FAST)
def rms_norm(x: Floats, weight: Floats, eps: Floats, out: Floats) -> None:
    """Write weight * x / sqrt(mean(x**2) + eps) of each row of x [T, C] to `out`; eps is [1]."""
    num_columns = x.shape[1]
    count = eps.dtype.type(num_columns)
    for t in range(x.shape[0]):
        total = x[t, 0] * x[t, 0]
        for c in range(1, num_columns):
            total += x[t, c] * x[t, c]
        scale = np.sqrt(total / count + eps[0])
        for c in range(num_columns):
            out[t, c] = weight[c] * (x[t, c] / scale)


@kernel
def silu_mul(gate_up: Floats, out: Floats) -> None:
    """Write silu(gate) * up to `out` [T, F], for gate_up [T, 2 F] with the gates first.

    Writes whole vectors, so up to one vector after the last row is overwritten.
    """
    size = out.shape[1]
    one, zero = broadcast(out.dtype.type(1)), broadcast(out.dtype.type(0))
    for t in range(out.shape[0]):
        for f in range(0, size, lanes(out)):
            gate, up = load(gate_up, 2 * t * size + f), load(gate_up, 2 * t * size + size + f)
            shrunk = divide(gate, add(one, exponential(subtract(zero, gate))))
            store(out, t * size + f, multiply(shrunk, up))


# No numba runtime: reference counts of each head's slices took most of the time.
@compiled_once(nogil=True, no_cfunc_wrapper=True, fastmath=FAST, error_model="numpy", _nrt=False)
def write_keys(
    qkv: Floats,
    q_norm: Floats,
    k_norm: Floats,
    eps: Floats,
    cos: Floats,
    sin: Floats,
    positions: Int64Array,
    slots: Int64Array,
    keys: Floats,
    values: Floats,
) -> None:
    """Normalise and rotate queries and keys of qkv [T, (H + 2 G) D] in place, and write keys and values to the arena.

    keys is [G, D, S], values [G, S, D] or wider, cos and sin [P, D]; empty norms are skipped.
    """
    num_kv_heads, head_size, _ = keys.shape
    num_heads = qkv.shape[1] // head_size - 2 * num_kv_heads
    in_vectors = head_size // 2 % lanes(qkv) == 0
    for t in range(qkv.shape[0]):
        at, slot = positions[t], slots[t]
        for head in range(num_heads + num_kv_heads):
            norm = q_norm if head < num_heads else k_norm
            if in_vectors:
                _norm_and_rotate(
                    qkv, t * qkv.shape[1] + head * head_size, norm, eps, cos, sin, at * head_size, head_size // 2
                )
                continue
            x = qkv[t, head * head_size : (head + 1) * head_size]
            if norm.size > 0:
                _norm_head(x, norm, eps)
            _rotate(x, cos[at], sin[at])
        for g in range(num_kv_heads):
            key_at, value_at = (num_heads + g) * head_size, (num_heads + num_kv_heads + g) * head_size
            for d in range(head_size):
                keys[g, d, slot] = qkv[t, key_at + d]
            if in_vectors:
                _copy(
                    qkv, t * qkv.shape[1] + value_at, values, (g * values.shape[1] + slot) * values.shape[2], head_size
                )
                continue
            for d in range(head_size):
                values[g, slot, d] = qkv[t, value_at + d]


@lean
def _norm_and_rotate(
    qkv: Floats, first: int, norm: Floats, eps: Floats, cos: Floats, sin: Floats, angle: int, half: int
) -> None:  # fmt: skip
    """Normalise and rotate the head at index `first` of qkv in vectors; half a head must be whole vectors."""
    step = lanes(qkv)
    scale = broadcast(qkv.dtype.type(1))
    if norm.size > 0:
        squares = broadcast(qkv.dtype.type(0))
        for d in range(0, 2 * half, step):
            x = load(qkv, first + d)
            squares = muladd(x, x, squares)
        scale = broadcast(qkv.dtype.type(1) / np.sqrt(total(squares) / qkv.dtype.type(2 * half) + eps[0]))
    for d in range(0, half, step):
        low, high = load(qkv, first + d), load(qkv, first + half + d)
        if norm.size > 0:
            low = multiply(load(norm, d), multiply(low, scale))
            high = multiply(load(norm, half + d), multiply(high, scale))
        turned = subtract(multiply(low, load(cos, angle + d)), multiply(high, load(sin, angle + d)))
        store(qkv, first + d, turned)
        turned = muladd(high, load(cos, angle + half + d), multiply(low, load(sin, angle + half + d)))
        store(qkv, first + half + d, turned)


@lean
def _copy(source: Floats, first: int, target: Floats, at: int, size: int) -> None:
    for d in range(0, size, lanes(source)):
        store(target, at + d, load(source, first + d))


@lean(fastmath=FAST)
def _norm_head(x: Floats, weight: Floats, eps: Floats) -> None:
    total = x[0] * x[0]
    for d in range(1, x.size):
        total += x[d] * x[d]
    scale = np.sqrt(total / eps.dtype.type(x.size) + eps[0])
    for d in range(x.size):
        x[d] = weight[d] * (x[d] / scale)


@lean(fastmath=FAST)
def _rotate(x: Floats, cos: Floats, sin: Floats) -> None:
    half = x.size // 2
    for d in range(half):
        first, second = x[d], x[half + d]
        x[d] = first * cos[d] - second * sin[d]
        x[half + d] = second * cos[half + d] + first * sin[half + d]


_FLOOR = -64.0
"""Scores this far below the largest are clamped: e**-64 = 1.6e-28 is negligible, and subnormal float32 is slow."""


@kernel
def attend(
    qkv: Floats,
    keys: Floats,
    values: Floats,
    prefix_start: Int64Array,
    num_prefix: Int64Array,
    own_start: Int64Array,
    num_own: Int64Array,
    tree_start: Int64Array,
    tree_bits: Int64Array,
    scale: Floats,
    scores: Floats,
    out: Floats,
) -> None:
    """Attend with each token's queries over its two spans and its tree; out is [T, H D], scale [1], scores [2, K].

    keys is [G, D, S], padded by a vector after the last visible slot, values [G, S, E]. Whole vectors are read from
    `qkv` and written to `out`, so up to one vector after the last row is overwritten.

    Two query heads of a key-value head are processed as a pair, so that keys and values are read once for both. If
    their number is odd, the last head is paired with itself.
    """
    num_kv_heads, head_size, num_slots = keys.shape
    padded_size = values.shape[2]
    group = out.shape[1] // head_size // num_kv_heads
    num_pairs = (group + 1) // 2
    size, zero = lanes(keys), broadcast(keys.dtype.type(0))
    for t in range(out.shape[0]):
        prefix, own, bits = num_prefix[t], num_own[t], tree_bits[t]
        num_tree = _length(bits)
        for pair in range(num_kv_heads * num_pairs):
            g, first = pair // num_pairs, pair % num_pairs * 2
            at, step = (g * group + first) * head_size, min(1, group - 1 - first) * head_size
            query, result = t * qkv.shape[1] + at, t * out.shape[1] + at
            key, value = g * head_size * num_slots, g * values.shape[1] * padded_size
            own_at = _score(qkv, query, step, keys, key + prefix_start[t], prefix, 0, scale[0], scores, 0)
            tree_at = _score(qkv, query, step, keys, key + own_start[t], own, 0, scale[0], scores, own_at)
            end = _score(qkv, query, step, keys, key + tree_start[t], num_tree, bits, scale[0], scores, tree_at)
            denominator, other_denominator = _softmax_weights(scores, end)
            # Last vector first: it may overwrite the start of the next head, which is written later.
            for d in range(padded_size - size, -1, -size):
                at = value + d
                sums = _accumulate(values, at + prefix_start[t] * padded_size, prefix, scores, 0, zero, zero)
                sums = _accumulate(values, at + own_start[t] * padded_size, own, scores, own_at, *sums)
                sums = _accumulate_tree(
                    values, at + tree_start[t] * padded_size, num_tree, bits, scores, tree_at, *sums
                )
                store(out, result + d, divide(sums[0], denominator))
                store(out, result + step + d, divide(sums[1], other_denominator))


@kernel
def move_slots(keys: Floats, values: Floats, sources: Int64Array, targets: Int64Array) -> None:
    """Copy slots of keys [layers, G, D, S] and values [layers, G, S, E], one after another."""
    for layer in range(keys.shape[0]):
        for g in range(keys.shape[1]):
            for k in range(sources.size):
                # Loops, because numba needs 1.5 seconds to compile the shape check of an array assignment.
                for d in range(keys.shape[2]):
                    keys[layer, g, d, targets[k]] = keys[layer, g, d, sources[k]]
                for d in range(values.shape[3]):
                    values[layer, g, targets[k], d] = values[layer, g, sources[k], d]


@lean
def _score(
    qkv: Floats, query: int, step: int, keys: Floats, first: int, count: int, bits: int, scale: Any, scores: Floats,
    offset: int,
) -> int:  # fmt: skip
    """Write scale * query . keys[:, j] to scores[:, offset + j] where bit j is set; bits = 0 means all j < count.

    The queries of a pair begin at `query` and `query + step`. keys is [D, S], vectorised over slots from index `first`.
    Writes whole vectors, -inf for invisible slots, and returns the offset after them. Separate sums over even and odd
    d shorten the dependency chain.
    """
    head_size, num_slots = keys.shape[1], keys.shape[2]
    size, stride = lanes(keys), scores.shape[1]
    factor, zero, unseen = broadcast(scale), broadcast(keys.dtype.type(0)), broadcast(keys.dtype.type(-np.inf))
    for j in range(0, count, size):
        even, odd, other_even, other_odd = zero, zero, zero, zero
        at = first + j
        for d in range(query, query + head_size, 2):
            one, next_one = load(keys, at), load(keys, at + num_slots)
            even = muladd(broadcast_from(qkv, d), one, even)
            odd = muladd(broadcast_from(qkv, d + 1), next_one, odd)
            other_even = muladd(broadcast_from(qkv, d + step), one, other_even)
            other_odd = muladd(broadcast_from(qkv, d + step + 1), next_one, other_odd)
            at += 2 * num_slots
        seen = _visible_bits(bits, j, count, size)
        store(scores, offset + j, select(seen, multiply(add(even, odd), factor), unseen))
        store(scores, stride + offset + j, select(seen, multiply(add(other_even, other_odd), factor), unseen))
    return int(offset + (count + size - 1) // size * size)


@lean
def _visible_bits(bits: int, j: int, count: int, size: int) -> int:
    """Return the visibility bits of the vector of slots from j on."""
    return int(bits >> j if bits != 0 else (np.int64(1) << min(count - j, size)) - 1)


@lean
def _length(bits: int) -> int:
    """Return the number of slots up to the highest set bit."""
    count = 64
    while count > 0 and (bits >> (count - 1)) & 1 == 0:
        count -= 1
    return count


@lean
def _accumulate(
    values: Floats, first: int, count: int, weights: Floats, offset: int, sums: Any, others: Any
) -> tuple[Any, Any]:
    """Add weights[0, offset + j] * v_j to `sums` and weights[1, offset + j] * v_j to `others`, for j < count.

    v_j is the vector at index `first` + j E of values.
    """
    step, stride = values.shape[2], weights.shape[1]
    second = other_second = broadcast(values.dtype.type(0))
    at, end = first, offset + count
    for j in range(offset, end - 1, 2):
        one, next_one = load(values, at), load(values, at + step)
        sums = muladd(broadcast_from(weights, j), one, sums)
        others = muladd(broadcast_from(weights, stride + j), one, others)
        second = muladd(broadcast_from(weights, j + 1), next_one, second)
        other_second = muladd(broadcast_from(weights, stride + j + 1), next_one, other_second)
        at += 2 * step
    if count % 2 == 1:
        sums = muladd(broadcast_from(weights, end - 1), load(values, at), sums)
        others = muladd(broadcast_from(weights, stride + end - 1), load(values, at), others)
    return add(sums, second), add(others, other_second)


@lean
def _accumulate_tree(
    values: Floats, first: int, count: int, bits: int, weights: Floats, offset: int, sums: Any, others: Any
) -> tuple[Any, Any]:
    """Accumulate as `_accumulate` does, over the slots whose bit is set."""
    stride = weights.shape[1]
    for j in range(count):
        if (bits >> j) & 1 == 1:
            one = load(values, first + j * values.shape[2])
            sums = muladd(broadcast_from(weights, offset + j), one, sums)
            others = muladd(broadcast_from(weights, stride + offset + j), one, others)
    return sums, others


@lean
def _softmax_weights(scores: Floats, end: int) -> tuple[Any, Any]:
    """Replace the scores before `end` of both rows by exp(score - largest), in place, in whole vectors.

    Returns two vectors filled with their sums. -inf becomes negligible, and NaN stays NaN.
    """
    size, stride = lanes(scores), scores.shape[1]
    top, other_top = load(scores, 0), load(scores, stride)
    for j in range(size, end, size):
        top, other_top = maximum(top, load(scores, j)), maximum(other_top, load(scores, stride + j))
    highest, other_highest = broadcast(largest(top)), broadcast(largest(other_top))
    floor = broadcast(scores.dtype.type(_FLOOR))
    sums = others = broadcast(scores.dtype.type(0))
    for j in range(0, end, size):
        weights = exponential(maximum(floor, subtract(load(scores, j), highest)))
        other_weights = exponential(maximum(floor, subtract(load(scores, stride + j), other_highest)))
        store(scores, j, weights)
        store(scores, stride + j, other_weights)
        sums, others = add(sums, weights), add(others, other_weights)
    return broadcast(total(sums)), broadcast(total(others))
