"""Attention of a decoder on CPU over its arena, compiled, without the interpreter lock.

Knows numbers only. All float arrays of a call have one dtype, float32 or float64, and the loops compute in it.

    T tokens   H query heads   G key-value heads   D head size   E head size in whole vectors   S slots
"""

from typing import Any

import numpy as np
from numba import njit

from treering.engine.kernels_cpu import Floats, Ints
from treering.engine.vectors_cpu import (
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

_FLOOR = -64.0
"""Of a score below the largest: e**-64 is 1.6e-28, nothing beside 1; with much less float32 is slow to compute."""


@njit(cache=True, nogil=True, error_model="numpy")
def attend(
    qkv: Floats,
    keys: Floats,
    values: Floats,
    prefix_start: Ints,
    num_prefix: Ints,
    own_start: Ints,
    num_own: Ints,
    tree_start: Ints,
    tree_bits: Ints,
    scale: Floats,
    scores: Floats,
    out: Floats,
) -> None:
    """Attention of each token's queries over its two spans and its tree; out is [T, H D], scale [1].

    keys is [G, D, S], with room for two vectors behind the slots that are seen, values [G, S, E]. A vector is
    read from `qkv` and written to `out` at a time, so less than one behind the last row is overwritten.
    """
    num_kv_heads, head_size, num_slots = keys.shape
    padded_size = values.shape[2]
    num_heads = out.shape[1] // head_size
    group = num_heads // num_kv_heads
    size, nothing = lanes(keys), spread(keys.dtype.type(0))
    for t in range(out.shape[0]):
        prefix, own, bits = num_prefix[t], num_own[t], tree_bits[t]
        num_tree = _length(bits)
        for head in range(num_heads):
            query, result = t * qkv.shape[1] + head * head_size, t * out.shape[1] + head * head_size
            key = head // group * head_size * num_slots
            value = head // group * values.shape[1] * padded_size
            own_at = _score(qkv, query, keys, key + prefix_start[t], prefix, 0, scale[0], scores, 0)
            tree_at = _score(qkv, query, keys, key + own_start[t], own, 0, scale[0], scores, own_at)
            end = _score(qkv, query, keys, key + tree_start[t], num_tree, bits, scale[0], scores, tree_at)
            sum_of_weights = spread(_soften(scores, end))
            for d in range(0, padded_size, size):
                at = value + d
                sums = _gather(values, at + prefix_start[t] * padded_size, prefix, scores, 0, nothing)
                sums = _gather(values, at + own_start[t] * padded_size, own, scores, own_at, sums)
                sums = _gather_tree(values, at + tree_start[t] * padded_size, num_tree, bits, scores, tree_at, sums)
                store(out, result + d, divide(sums, sum_of_weights))


@njit(cache=True, nogil=True)
def move_slots(keys: Floats, values: Floats, sources: Ints, targets: Ints) -> None:
    """Copies keys [layers, G, D, S] and values [layers, G, S, E] of slots to others, one after another."""
    for layer in range(keys.shape[0]):
        for g in range(keys.shape[1]):
            for k in range(sources.size):
                keys[layer, g, :, targets[k]] = keys[layer, g, :, sources[k]]
                values[layer, g, targets[k]] = values[layer, g, sources[k]]


@njit(cache=True, nogil=True)
def _score(
    qkv: Floats, query: int, keys: Floats, first: int, count: int, bits: int, scale: Any, scores: Floats, offset: int
) -> int:
    """Puts scale * query . keys[:, j] into scores[offset + j] where bit j is set, all of them where none is.

    keys is [D, S], so that slots are vectors; they begin at number `first`. Whole vectors are written, with -inf where
    nothing is seen, and what stands behind them is returned. Two sums of each, over even and odd d, do not wait for one
    another.
    """
    head_size, num_slots = keys.shape[1], keys.shape[2]
    size = lanes(keys)
    factor, zero, unseen = spread(scale), spread(keys.dtype.type(0)), spread(keys.dtype.type(-np.inf))
    for j in range(0, count, 2 * size):
        even, odd, next_even, next_odd = zero, zero, zero, zero
        at, has_next = first + j, count - j > size
        for d in range(query, query + head_size, 2):
            one, other = spread_from(qkv, d), spread_from(qkv, d + 1)
            even = muladd(one, load(keys, at), even)
            odd = muladd(other, load(keys, at + num_slots), odd)
            if has_next:
                next_even = muladd(one, load(keys, at + size), next_even)
                next_odd = muladd(other, load(keys, at + num_slots + size), next_odd)
            at += 2 * num_slots
        seen = _seen(bits, j, count, size)
        store(scores, offset + j, choose(seen, multiply(add(even, odd), factor), unseen))
        if has_next:
            seen = _seen(bits, j + size, count, size)
            store(scores, offset + j + size, choose(seen, multiply(add(next_even, next_odd), factor), unseen))
    return int(offset + (count + size - 1) // size * size)


@njit(cache=True, nogil=True)
def _seen(bits: int, j: int, count: int, size: int) -> int:
    """A bit for each of the slots from j on, as many as a vector has."""
    return int(bits >> j if bits != 0 else (np.int64(1) << min(count - j, size)) - 1)


@njit(cache=True, nogil=True)
def _length(bits: int) -> int:
    """Slots up to the last one whose bit is set."""
    count = 64
    while count > 0 and (bits >> (count - 1)) & 1 == 0:
        count -= 1
    return count


@njit(cache=True, nogil=True)
def _gather(values: Floats, first: int, count: int, weights: Floats, offset: int, sums: Any) -> Any:
    """`sums` and weights[offset + j] times the vector of slot j, which begins at number `first` + j E of values."""
    step = values.shape[2]
    zero = spread(values.dtype.type(0))
    second, third, fourth = zero, zero, zero
    num_blocked = count // 4 * 4
    at = first
    for j in range(offset, offset + num_blocked, 4):
        sums = muladd(spread_from(weights, j), load(values, at), sums)
        second = muladd(spread_from(weights, j + 1), load(values, at + step), second)
        third = muladd(spread_from(weights, j + 2), load(values, at + 2 * step), third)
        fourth = muladd(spread_from(weights, j + 3), load(values, at + 3 * step), fourth)
        at += 4 * step
    for j in range(offset + num_blocked, offset + count):
        sums = muladd(spread_from(weights, j), load(values, at), sums)
        at += step
    return add(add(sums, second), add(third, fourth))


@njit(cache=True, nogil=True)
def _gather_tree(values: Floats, first: int, count: int, bits: int, weights: Floats, offset: int, sums: Any) -> Any:
    """`_gather` of those of the slots whose bit is set."""
    for j in range(count):
        if (bits >> j) & 1 == 1:
            sums = muladd(spread_from(weights, offset + j), load(values, first + j * values.shape[2]), sums)
    return sums


@njit(cache=True, nogil=True)
def _soften(scores: Floats, end: int) -> Any:
    """Turns the first scores, whole vectors of them, into exp(score - largest), in place, and returns their sum.

    -inf becomes as good as nothing, and NaN stays NaN.
    """
    size = lanes(scores)
    top = load(scores, 0)
    for j in range(size, end, size):
        top = maximum(top, load(scores, j))
    highest, floor = spread(largest(top)), spread(scores.dtype.type(_FLOOR))
    sums = spread(scores.dtype.type(0))
    for j in range(0, end, size):
        weights = exponential(maximum(floor, subtract(load(scores, j), highest)))
        store(scores, j, weights)
        sums = add(sums, weights)
    return total(sums)
