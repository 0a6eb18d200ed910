"""Attention of a decoder on CPU over its arena, compiled, without the interpreter lock.

Knows numbers only. All float arrays of a call have one dtype, float32 or float64, and the loops compute in it.

    T tokens   H query heads   G key-value heads   D head size   E head size in whole vectors   S slots
    K room for what a token sees
"""

from typing import Any

import numpy as np
from numba import njit

from treering.arrays import Int64Array
from treering.engine.decoder.cpu.kernels import Floats
from treering.engine.decoder.cpu.simd import (
    add,
    choose,
    divide,
    exponential,
    lanes,
    largest,
    load,
    maximum,
    muladd,
    multiply,
    spread,
    spread_from,
    store,
    subtract,
    total,
)
from treering.history.jit import lean

_FLOOR = -64.0
"""Of a score below the largest: e**-64 is 1.6e-28, nothing beside 1; with much less float32 is slow to compute."""


# Without numba's runtime, as all that it calls: counting references took a third of the time.
@njit(cache=True, nogil=True, error_model="numpy", _nrt=False)
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
    """Attention of each token's queries over its two spans and its tree; out is [T, H D], scale [1], scores [2, K].

    keys is [G, D, S], with room for a vector behind the slots that are seen, values [G, S, E]. A vector is read from
    `qkv` and written to `out` at a time, so less than one behind the last row is overwritten.

    Two query heads of one key-value head go side by side, and read what both see once. Where they are an odd number,
    the last one goes beside itself.
    """
    num_kv_heads, head_size, num_slots = keys.shape
    padded_size = values.shape[2]
    group = out.shape[1] // head_size // num_kv_heads
    num_pairs = (group + 1) // 2
    size, nothing = lanes(keys), spread(keys.dtype.type(0))
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
            whole, other_whole = _soften(scores, end)
            # The last vector first: it may reach into the head behind it, whose first one comes after it then.
            for d in range(padded_size - size, -1, -size):
                at = value + d
                sums = _gather(values, at + prefix_start[t] * padded_size, prefix, scores, 0, nothing, nothing)
                sums = _gather(values, at + own_start[t] * padded_size, own, scores, own_at, *sums)
                sums = _gather_tree(values, at + tree_start[t] * padded_size, num_tree, bits, scores, tree_at, *sums)
                store(out, result + d, divide(sums[0], whole))
                store(out, result + step + d, divide(sums[1], other_whole))


@njit(cache=True, nogil=True)
def move_slots(keys: Floats, values: Floats, sources: Int64Array, targets: Int64Array) -> None:
    """Copies keys [layers, G, D, S] and values [layers, G, S, E] of slots to others, one after another."""
    for layer in range(keys.shape[0]):
        for g in range(keys.shape[1]):
            for k in range(sources.size):
                keys[layer, g, :, targets[k]] = keys[layer, g, :, sources[k]]
                values[layer, g, targets[k]] = values[layer, g, sources[k]]


@lean
def _score(
    qkv: Floats, query: int, step: int, keys: Floats, first: int, count: int, bits: int, scale: Any, scores: Floats,
    offset: int,
) -> int:  # fmt: skip
    """Puts scale * query . keys[:, j] into scores[:, offset + j] where bit j is set, all of them where none is.

    The queries of a pair begin at `query` and `query + step`. keys is [D, S], so that slots are vectors; they begin at
    number `first`. Whole vectors are written, with -inf where nothing is seen, and what stands behind them is returned.
    Two sums of each, over even and odd d, do not wait for one another.
    """
    head_size, num_slots = keys.shape[1], keys.shape[2]
    size, far = lanes(keys), scores.shape[1]
    factor, zero, unseen = spread(scale), spread(keys.dtype.type(0)), spread(keys.dtype.type(-np.inf))
    for j in range(0, count, size):
        even, odd, other_even, other_odd = zero, zero, zero, zero
        at = first + j
        for d in range(query, query + head_size, 2):
            one, next_one = load(keys, at), load(keys, at + num_slots)
            even = muladd(spread_from(qkv, d), one, even)
            odd = muladd(spread_from(qkv, d + 1), next_one, odd)
            other_even = muladd(spread_from(qkv, d + step), one, other_even)
            other_odd = muladd(spread_from(qkv, d + step + 1), next_one, other_odd)
            at += 2 * num_slots
        seen = _seen(bits, j, count, size)
        store(scores, offset + j, choose(seen, multiply(add(even, odd), factor), unseen))
        store(scores, far + offset + j, choose(seen, multiply(add(other_even, other_odd), factor), unseen))
    return int(offset + (count + size - 1) // size * size)


@lean
def _seen(bits: int, j: int, count: int, size: int) -> int:
    """A bit for each of the slots from j on, as many as a vector has."""
    return int(bits >> j if bits != 0 else (np.int64(1) << min(count - j, size)) - 1)


@lean
def _length(bits: int) -> int:
    """Slots up to the last one whose bit is set."""
    count = 64
    while count > 0 and (bits >> (count - 1)) & 1 == 0:
        count -= 1
    return count


@lean
def _gather(
    values: Floats, first: int, count: int, weights: Floats, offset: int, sums: Any, others: Any
) -> tuple[Any, Any]:
    """`sums` and weights[0, offset + j] times the vector of slot j, and `others` and weights[1, offset + j] times it.

    The vectors begin at number `first` + j E of values.
    """
    step, far = values.shape[2], weights.shape[1]
    second = other_second = spread(values.dtype.type(0))
    at, end = first, offset + count
    for j in range(offset, end - 1, 2):
        one, next_one = load(values, at), load(values, at + step)
        sums = muladd(spread_from(weights, j), one, sums)
        others = muladd(spread_from(weights, far + j), one, others)
        second = muladd(spread_from(weights, j + 1), next_one, second)
        other_second = muladd(spread_from(weights, far + j + 1), next_one, other_second)
        at += 2 * step
    if count % 2 == 1:
        sums = muladd(spread_from(weights, end - 1), load(values, at), sums)
        others = muladd(spread_from(weights, far + end - 1), load(values, at), others)
    return add(sums, second), add(others, other_second)


@lean
def _gather_tree(
    values: Floats, first: int, count: int, bits: int, weights: Floats, offset: int, sums: Any, others: Any
) -> tuple[Any, Any]:
    """`_gather` of those of the slots whose bit is set."""
    far = weights.shape[1]
    for j in range(count):
        if (bits >> j) & 1 == 1:
            one = load(values, first + j * values.shape[2])
            sums = muladd(spread_from(weights, offset + j), one, sums)
            others = muladd(spread_from(weights, far + offset + j), one, others)
    return sums, others


@lean
def _soften(scores: Floats, end: int) -> tuple[Any, Any]:
    """Turns the first scores of both rows, whole vectors of them, into exp(score - largest), in place.

    Returns vectors of their sums. -inf becomes as good as nothing, and NaN stays NaN.
    """
    size, far = lanes(scores), scores.shape[1]
    top, other_top = load(scores, 0), load(scores, far)
    for j in range(size, end, size):
        top, other_top = maximum(top, load(scores, j)), maximum(other_top, load(scores, far + j))
    highest, other_highest = spread(largest(top)), spread(largest(other_top))
    floor = spread(scores.dtype.type(_FLOOR))
    sums = others = spread(scores.dtype.type(0))
    for j in range(0, end, size):
        weights = exponential(maximum(floor, subtract(load(scores, j), highest)))
        other_weights = exponential(maximum(floor, subtract(load(scores, far + j), other_highest)))
        store(scores, j, weights)
        store(scores, far + j, other_weights)
        sums, others = add(sums, weights), add(others, other_weights)
    return spread(total(sums)), spread(total(others))
