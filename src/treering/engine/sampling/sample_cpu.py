"""Sample tokens and verify draft trees on the CPU: `torch_sampling` compiled to a few passes over a row.

Returns the tokens of `reference.sample`, and their log-probabilities up to rounding (about 1e-15). Clear numba's cache
after changing `MASS_SLACK` or the constants of `noise`, which it does not track. On CUDA with triton,
`treering.engine.decoder.cuda.verify` does the same on the device.

    T rows of logits   B rollouts   R sampled rows   D draft tokens   J most drafts of a row
    K max tokens per rollout   V vocabulary   M rows of contexts   L longest context   W sampled positions
"""

import math

import numpy as np

from treering.arrays import BoolArray, Float32Array, Float64Array, Int32Array, Int64Array
from treering.compiling.lean import kernel, lean
from treering.engine.sampling.noise import MIX_FACTORS, MIX_SHIFTS, NUM_DROPPED_BITS, POSITION_STEP, TOKEN_STEP
from treering.engine.sampling.torch_sampling import MASS_SLACK

Logits = Float32Array | Float64Array

# Typed, because numba turns uint64 times int64 into a float.
_POSITION_STEP, _TOKEN_STEP = np.uint64(POSITION_STEP), np.uint64(TOKEN_STEP)
_FACTOR_1, _FACTOR_2 = np.uint64(MIX_FACTORS[0]), np.uint64(MIX_FACTORS[1])
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(MIX_SHIFTS[0]), np.uint64(MIX_SHIFTS[1]), np.uint64(MIX_SHIFTS[2])
_DROPPED = np.uint64(NUM_DROPPED_BITS)
_RESOLUTION = 2.0 ** (NUM_DROPPED_BITS - 64)

_LOG2_E = 1.0 / math.log(2.0)
# log 2 in two parts; the first has 20 trailing zero bits, so that its product with an exponent is exact.
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
# Adding it rounds to an integer and leaves that in the lowest bits.
_ROUNDER = 1.5 * 2.0**52
_EXPONENT_BIAS, _MANTISSA_BITS = np.int64(1023), np.int64(52)
# Below this, exp is subnormal, and no noise lifts such a small weight above the top one.
_LEAST_EXPONENT = -708.0
_TAYLOR = tuple(1.0 / math.factorial(n) for n in range(14))

_BLOCK = 64
_LEAST_CANDIDATES = 64
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
    """Return the noise state at a position of a rollout, from which every token's uniform number derives."""
    state: np.uint64 = _mix(np.uint64(key) + np.uint64(position) * _POSITION_STEP)
    return state


@lean(fastmath={"contract"})
def _exp(x: float) -> float:
    """Return e**x for x <= 0, within 2e-16 relative; NaN stays NaN. Loops vectorise: no branches, no calls."""
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
    """Fill `weights` with probabilities relative to the top token's."""
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
    """Return False only if weight / -log(u) is below `best`; uses the bound -log(u) >= 1 - u."""
    return weight >= best * (1.0 - u) * _ROUNDING_SLACK


@lean
def _gumbel_max(ids: Int64Array, weights: Float64Array, state: np.uint64) -> int:
    """Return the id among `ids` with the greatest weight / -log(u)."""
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
    """Run `_gumbel_max` over the whole vocabulary, with logarithms only for tokens that may beat the best so far."""
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
    """Return token, log-probability and policy log-probability of one row; token -1 for invalid logits."""
    likeliest = 0
    for token in range(row.size):
        if row[token] > row[likeliest]:
            likeliest = token
    top = np.float64(row[likeliest])
    _fill_weights(row, top, temperature, weights)
    total = _total(weights)
    # NaN anywhere, +inf - inf and -inf - -inf all give a NaN total.
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
    """Return the log-probability of a token after temperature only."""
    largest = row[0]
    for at in range(1, row.size):
        largest = max(largest, row[at])
    top = np.float64(largest)
    _fill_weights(row, top, temperature, weights)
    return (np.float64(row[token]) - top) / temperature - math.log(_total(weights))


@lean
def penalise(row: Logits, seen: Int64Array, penalty: float, out: Logits) -> None:
    """Fill `out` with the row's logits, penalised for the distinct tokens `seen`."""
    for token in range(row.size):
        out[token] = row[token]
    for i in range(seen.size):
        token = seen[i]
        out[token] = out[token] * penalty if out[token] < 0 else out[token] / penalty


@lean(inline=False)
def _select(row: Logits, ids: Int64Array, amounts: Float64Array, reach: float) -> int:
    """Move the ids whose predecessors' amounts sum to less than `reach` to the front, and return their number.

    Ids rank by logit, ties by smaller id. The method is quickselect.
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
    """Fill the front of `ids` with the k largest logits, and return their number; below k only if tokens are hidden.

    Collects candidates above the k-th largest logit so far, and selects the best k whenever there are 2 k.
    """
    num_ids, floor = 0, -np.inf
    capacity = max(2 * k, _LEAST_CANDIDATES)
    for token in range(row.size):
        # An equal logit with a larger id ranks after all k.
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
    """Move the ids whose mass reaches `top_p` of `total` to the front, and return their number."""
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
    """Return the total weight of some tokens."""
    total = 0.0
    for at in range(ids.size):
        total += weights[ids[at]]
    return total


@lean
def keep(row: Logits, ids: Int64Array, weights: Float64Array, ones: Float64Array, top_k: int, top_p: float) -> int:
    """Move the ids that top-k and top-p keep to the front, and return their number."""
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
    """Move the ids whose logit over `temperature` is at most -log_min_p below `top`'s to the front, and count them.

    Compares logits, which round the same everywhere, rather than probabilities.
    """
    num_ids = 0
    for at in range(ids.size):
        token = ids[at]
        ids[num_ids] = token
        num_ids += int((np.float64(row[token]) - top) / temperature >= log_min_p)
    return num_ids


@lean
def child(token: int, number: int, num_drafts: int, drafts: Int32Array, parents: Int32Array, first: int) -> int:
    """Return the child of draft `number` (-1: the context) that equals `token`; -1 if there is none.

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
    """Sample the next tokens of every rollout: its accepted drafts and one more.

    Rollout b owns the logits rows first_row[b] .. first_row[b] + num_drafts[b]: the first follows its context, row 1 +
    j its draft j. Sampling walks down the tree: each token is sampled with its position's noise, whatever the branch;
    the walk continues at the child that equals it and stops if there is none. So each token is that of
    `reference.sample`, whatever was drafted, and rows off the path are not read. A penalty counts the tokens of the
    context and of the path, all of them sampled, so drafts do not change it. Runs without the interpreter lock.

    Args:
        logits: float32 or float64 [T, V], before temperature; rows contiguous.
        first_row: int64 [B].
        num_drafts: int64 [B], 0 without drafts.
        drafts: int32 [D], drafts of all rollouts, one after another.
        parents: int32 [D], index of each token's parent within the rollout's drafts, smaller than its own; -1 for none.
        draft_offsets: int64 [B] or longer; b's drafts start at draft_offsets[b].
        keys: int64 [B], from `row_key`.
        positions: int64 [B], absolute position of the first sampled token.
        temperature: float64 [B], > 0.
        top_k: int64 [B], 0 means all.
        top_p: float64 [B], in (0, 1].
        log_min_p: float64 [B], -inf means all.
        penalty: float64 [B], for repeated tokens; 1 means none.
        contexts: int32 [M, L], prompts and rollouts so far; read only for rollouts with a penalty.
        rows: int64 [B]; b's context is the first positions[b] tokens of contexts[rows[b]].
        tokens_out: int32 [B, K], written; K > every entry of num_drafts.
        logprobs_out: float64 [B, K], written.
        policy_out: float64 [B, K], written.
        num_out: int64 [B], written: accepted drafts + 1.
        path_out: int32 [B, K], written: indices of the accepted drafts, then -1.

    Returns:
        -1, or the first b with invalid logits in a sampled row (NaN, +inf, or only -inf): raise `reference.diverged`.

    Example: drafts [4, 5] with parents [-1, 0] and samples 4, then 9 give tokens_out [4, 9], num_out 2 and path_out
    [0, -1]; the third row is not read. If 9 is drafted too, with parents [-1, 0, 0], a third token is sampled from the
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
        # Penalised logits are no longer float32.
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
    """Run `verify` for the rollouts with a penalty, or for those without; arrays after `rows` are scratch space."""
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
    """Add a token to `seen` unless it is there already or beyond the vocabulary; return the new number."""
    if token >= is_seen.size or is_seen[token]:
        return num_seen
    is_seen[token] = True
    seen[num_seen] = token
    return num_seen + 1
