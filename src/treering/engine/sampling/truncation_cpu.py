"""Top-k, top-p and min-p filtering of a row of logits on the CPU, compiled.

numba's cache does not notice a change of `MASS_SLACK`.

    V vocabulary
"""

import numpy as np

from treering.arrays import Float32Array, Float64Array, Int64Array
from treering.engine.sampling.reference import MASS_SLACK
from treering.lean import lean

Logits = Float32Array | Float64Array

_LEAST_CANDIDATES = 64


@lean(inline=False)
def _select(row: Logits, ids: Int64Array, amounts: Float64Array, reach: float) -> int:
    """Moves the ids whose predecessors' amounts sum to less than `reach` to the front, and counts them (quickselect).

    Ids rank by logit, ties by smaller id first.
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


@lean
def _largest(row: Logits, k: int, ids: Int64Array, ones: Float64Array) -> int:
    """Fills the front of `ids` with the k largest logits, and counts them; fewer than k only if tokens are hidden.

    Collects candidates above the k-th largest logit so far, and selects the best k whenever there are 2 k.
    """
    num_ids, floor = 0, -np.inf
    capacity = max(2 * k, _LEAST_CANDIDATES)
    for token in range(row.size):
        # An equal logit with a larger id ranks after all of the k.
        if row[token] <= floor:
            continue
        ids[num_ids] = token
        num_ids += 1
        if num_ids == capacity:
            num_ids = _select(row, ids[:num_ids], ones, float(k))
            floor = np.inf
            for at in range(num_ids):
                floor = min(floor, np.float64(row[ids[at]]))
    num_kept: int = _select(row, ids[:num_ids], ones, float(k))
    return num_kept


@lean
def _largest_mass(row: Logits, ids: Int64Array, weights: Float64Array, total: float, top_p: float) -> int:
    """Moves the ids whose mass reaches `top_p` of `total` to the front, and counts them."""
    # All tokens below it sum to less than 1 - top_p, so the tokens ranked above them reach top_p.
    least = (1.0 - top_p) * total / ids.size
    num_ids = 0
    for at in range(ids.size):
        token = ids[at]
        ids[num_ids] = token
        num_ids += int(weights[token] >= least)
    num_kept: int = _select(row, ids[:num_ids], weights, max(top_p - MASS_SLACK, MASS_SLACK) * total)
    return num_kept


@lean
def total_of(ids: Int64Array, weights: Float64Array) -> float:
    """The total weight of some tokens."""
    total = 0.0
    for at in range(ids.size):
        total += weights[ids[at]]
    return total


@lean
def keep(row: Logits, ids: Int64Array, weights: Float64Array, ones: Float64Array, top_k: int, top_p: float) -> int:
    """Moves the ids that top-k and top-p keep to the front, and counts them."""
    num_ids = row.size
    if 0 < top_k < num_ids:
        num_ids = _largest(row, top_k, ids, ones)
    else:
        for token in range(num_ids):
            ids[token] = token
    if top_p < 1.0:
        num_ids = _largest_mass(row, ids[:num_ids], weights, total_of(ids[:num_ids], weights), top_p)
    return num_ids


@lean
def keep_likely(row: Logits, ids: Int64Array, top: float, temperature: float, log_min_p: float) -> int:
    """Moves the ids whose logit over `temperature` is at most -log_min_p below `top`'s to the front, and counts them.

    Compares logits, whose rounding is the same everywhere, and not probabilities.
    """
    num_ids = 0
    for at in range(ids.size):
        token = ids[at]
        ids[num_ids] = token
        num_ids += int((np.float64(row[token]) - top) / temperature >= log_min_p)
    return num_ids
