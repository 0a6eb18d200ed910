"""The operations between a CPU decoder's matrix products, each one compiled loop without the interpreter lock.

All float arrays of a call have one dtype, float32 or float64, and the loops compute in it.

    T tokens   C hidden size   F MLP size   H query heads   G key-value heads   D head size   S slots   P positions
"""

import numpy as np
from numpy.typing import NDArray

from treering.arrays import Int64Array
from treering.compiling.lean import kernel, lean
from treering.compiling.once import compiled_once
from treering.engine.decoder.cpu.simd import (
    add,
    broadcast,
    divide,
    exponential,
    lanes,
    load,
    muladd,
    multiply,
    store,
    subtract,
    total,
)

Floats = NDArray[np.floating]

# Sums may be reordered into vectors; NaN and infinity keep their meaning, so that diverged weights are detected.
FAST = {"reassoc", "contract", "arcp", "nsz"}


@compiled_once(nogil=True, no_cfunc_wrapper=True, fastmath=FAST)
def rms_norm(x: Floats, weight: Floats, eps: Floats, out: Floats) -> None:
    """Writes weight * x / sqrt(mean(x**2) + eps) of each row of x [T, C] to `out`; eps is [1]."""
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
    """Writes silu(gate) * up to `out` [T, F], for gate_up [T, 2 F] with the gates first.

    Writes whole vectors, so up to a vector after the last row is overwritten.
    """
    size = out.shape[1]
    one, zero = broadcast(out.dtype.type(1)), broadcast(out.dtype.type(0))
    for t in range(out.shape[0]):
        for f in range(0, size, lanes(out)):
            gate, up = load(gate_up, 2 * t * size + f), load(gate_up, 2 * t * size + size + f)
            shrunk = divide(gate, add(one, exponential(subtract(zero, gate))))
            store(out, t * size + f, multiply(shrunk, up))


# Without numba's runtime: reference counting of each head's slices took most of the time.
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
    """Norms and rotates queries and keys of qkv [T, (H + 2 G) D] in place, and writes keys and values to the arena.

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
    """Norms and rotates the head at index `first` of qkv in vectors; half a head must be a whole number of vectors."""
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
    """Copies whole vectors."""
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
