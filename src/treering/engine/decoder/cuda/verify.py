"""Sample and verify draft trees on the device, and fetch the packed result in one copy.

Uses Gumbel-max sampling as `engine.sampling.torch_sampling` does, without another [W, V] array: the kernel computes
noise and probabilities in float64, so tokens equal the reference's up to near-ties. The host waits for the device once
per step.

    W wanted positions   V vocabulary   N tiles of V   R sampled rows   J most drafts of a row
"""

from typing import NamedTuple, no_type_check

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from treering.arrays import Int64Array
from treering.engine.batch.rows import BatchState
from treering.engine.batch.step_inputs import MOST_DRAFTS, DraftTrees, StepInputs, VerifiedTokens
from treering.engine.decoder.cuda.device import Staging, on_device, to_host
from treering.engine.sampling.noise import MIX_FACTORS, MIX_SHIFTS, NUM_DROPPED_BITS, POSITION_STEP, TOKEN_STEP
from treering.engine.sampling.torch_sampling import Repetitions, diverged, sample

_TILE = 1024


@triton.jit
@no_type_check
def _mixed(bits, FIRST: tl.constexpr, SECOND: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr):
    bits = (bits ^ (bits >> S0)) * FIRST
    bits = (bits ^ (bits >> S1)) * SECOND
    return bits ^ (bits >> S2)


@triton.jit
@no_type_check
def gumbel_max_kernel(
    logits_ptr,
    keys_ptr,
    positions_ptr,
    temperature_ptr,
    peaks_ptr,
    totals_ptr,
    bests_ptr,
    winners_ptr,
    num_tiles,
    VOCABULARY: tl.constexpr,
    TILE: tl.constexpr,
    POSITION: tl.constexpr,
    TOKEN: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    DROPPED: tl.constexpr,
):
    """Compute per tile of a position's logits: the maximum, the sum of exponentials relative to it, and the best token.

    A tile with NaN or +inf has a peak of +inf. Grid (W, N).
    """
    wanted, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    is_token = token < VOCABULARY
    logits = tl.load(logits_ptr + wanted * VOCABULARY + token, mask=is_token, other=float("-inf")).to(tl.float64)
    is_bad = (logits != logits) | (logits == float("inf"))
    peak = tl.where(tl.max(is_bad.to(tl.int32), 0) > 0, float("inf"), tl.max(tl.where(is_bad, 0.0, logits), 0))
    # A tile without finite logits has no winner; a shift of 0 only avoids NaN.
    shift = tl.where((peak == float("inf")) | (peak == float("-inf")), 0.0, peak)
    scaled = (tl.where(is_bad, 0.0, logits) - shift) / tl.load(temperature_ptr + wanted)
    weight = tl.exp(scaled)
    zero = tl.zeros([TILE], tl.uint64)
    key = zero + tl.load(keys_ptr + wanted).to(tl.uint64, bitcast=True)
    position = zero + tl.load(positions_ptr + wanted).to(tl.uint64)
    state = _mixed(key + position * POSITION, FIRST, SECOND, S0, S1, S2)
    bits = _mixed(state + token.to(tl.uint64) * TOKEN, FIRST, SECOND, S0, S1, S2) >> DROPPED
    # As in `uniforms`: 52 bits or fewer, plus half of 2**-52.
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    score = tl.where(is_token, weight / -tl.log(uniform), -1.0)
    best = tl.max(score, 0)
    winner = tl.min(tl.where(score == best, token, VOCABULARY), 0)
    cell = wanted * num_tiles + tile
    tl.store(peaks_ptr + cell, peak)
    tl.store(totals_ptr + cell, tl.sum(tl.where(is_token, weight, 0.0), 0))
    tl.store(bests_ptr + cell, best)
    tl.store(winners_ptr + cell, winner)


@triton.jit
@no_type_check
def reduce_tiles_kernel(
    logits_ptr,
    temperature_ptr,
    peaks_ptr,
    totals_ptr,
    bests_ptr,
    winners_ptr,
    tokens_ptr,
    logprobs_ptr,
    num_tiles,
    VOCABULARY: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write the best token of all tiles and its log-probability; token -1 for invalid logits. Grid (W,)."""
    wanted = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, PADDED)
    is_tile = tile < num_tiles
    cell = wanted * num_tiles + tile
    peaks = tl.load(peaks_ptr + cell, mask=is_tile, other=float("-inf"))
    peak = tl.max(peaks, 0)
    is_bad = (peak == float("inf")) | (peak == float("-inf"))
    is_finite = is_tile & (peaks > float("-inf")) & (peaks < float("inf"))
    temperature = tl.load(temperature_ptr + wanted)
    shift = tl.where(is_bad, 0.0, peak)
    factor = tl.where(is_finite, tl.exp((tl.where(is_finite, peaks, shift) - shift) / temperature), 0.0)
    total = tl.sum(tl.load(totals_ptr + cell, mask=is_tile, other=0.0) * factor, 0)
    score = tl.where(is_tile, tl.load(bests_ptr + cell, mask=is_tile, other=0.0) * factor, -1.0)
    first = tl.min(tl.where(score == tl.max(score, 0), tile, PADDED), 0)
    token = tl.load(winners_ptr + wanted * num_tiles + tl.minimum(first, num_tiles - 1))
    logit = tl.load(logits_ptr + wanted * VOCABULARY + token).to(tl.float64)
    tl.store(tokens_ptr + wanted, tl.where(is_bad, -1, token))
    logprob = (logit - shift) / temperature - tl.log(tl.where(is_bad, 1.0, total))
    tl.store(logprobs_ptr + wanted, tl.where(is_bad, 0.0, logprob))


class GumbelSamples(NamedTuple):
    """One sampled token per wanted position."""

    tokens: Tensor
    """int32 [W]; -1 for invalid logits."""
    logprobs: Tensor
    """float64 [W]."""


def gumbel_max(logits: Tensor, keys: Tensor, positions: Tensor, temperature: Tensor) -> GumbelSamples:
    """Sample one token per row as `reference.sample` does without top-k and top-p, with two kernels and no host wait.

    Args:
        logits: [W, V] before temperature, contiguous; any float type.
        keys: int64 [W], noise keys of the rows' rollouts.
        positions: int64 [W], absolute positions of the sampled tokens.
        temperature: float64 [W], > 0.

    Example: with equal logits, each of 4 tokens has log-probability -1.386.
    """
    num_wanted, vocabulary = logits.shape
    num_tiles = -(-vocabulary // _TILE)
    peaks, totals, bests = (
        torch.empty(num_wanted, num_tiles, dtype=torch.float64, device=logits.device) for _ in range(3)
    )
    winners = torch.empty(num_wanted, num_tiles, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_wanted, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(num_wanted, dtype=torch.float64, device=logits.device)
    gumbel_max_kernel[(num_wanted, num_tiles)](
        logits, keys, positions, temperature, peaks, totals, bests, winners, num_tiles,
        VOCABULARY=vocabulary, TILE=_TILE, POSITION=POSITION_STEP, TOKEN=TOKEN_STEP,
        FIRST=MIX_FACTORS[0], SECOND=MIX_FACTORS[1], S0=MIX_SHIFTS[0], S1=MIX_SHIFTS[1], S2=MIX_SHIFTS[2],
        DROPPED=NUM_DROPPED_BITS, num_warps=4,
    )  # fmt: skip
    reduce_tiles_kernel[(num_wanted,)](
        logits, temperature, peaks, totals, bests, winners, tokens, logprobs, num_tiles,
        VOCABULARY=vocabulary, PADDED=max(2, 1 << (num_tiles - 1).bit_length()), num_warps=1,
    )  # fmt: skip
    return GumbelSamples(tokens, logprobs)


_PACKED = 4
"""Packed entries per sampled token: the token, two log-probabilities, and the index of the draft that equals it."""


@triton.jit(do_not_specialize=["depth_most"])
@no_type_check
def walk_kernel(
    tokens_ptr,
    logprobs_ptr,
    policy_ptr,
    rows_ptr,
    drafts_ptr,
    parents_ptr,
    packed_ptr,
    depth_most,
    MOST: tl.constexpr,
):
    """Walk each row's tree along the sampled tokens into float64 packed [R, 1 + 4 (1 + J)]; grid (R,).

    `rows` is int64 [R, 3]: first wanted position, first draft, number of drafts. A packed line is the number of tokens
    (0 if one had invalid logits), then token, log-probs and next draft of each.
    """
    row = tl.program_id(0).to(tl.int64)
    first_wanted, first_draft = tl.load(rows_ptr + row * 3), tl.load(rows_ptr + row * 3 + 1)
    num_drafts = tl.load(rows_ptr + row * 3 + 2)
    number = tl.arange(0, MOST)
    is_draft = number < num_drafts
    drafted = tl.load(drafts_ptr + first_draft + number, mask=is_draft, other=-1)
    parents = tl.load(parents_ptr + first_draft + number, mask=is_draft, other=-2)
    line = packed_ptr + row * (1 + 4 * (1 + depth_most))
    at = tl.full([], -1, tl.int32)
    count = tl.full([], 0, tl.int32)
    is_good = tl.full([], 1, tl.int32)
    is_on = tl.full([], 1, tl.int32)
    while is_on != 0:
        cell = first_wanted + 1 + at
        token = tl.load(tokens_ptr + cell)
        child = tl.min(tl.where(is_draft & (parents == at) & (drafted == token), number, MOST), 0)
        is_on = tl.where(child < MOST, 1, 0)
        following = tl.where(child < MOST, child, -1)
        out = line + 1 + 4 * count
        tl.store(out, token.to(tl.float64))
        tl.store(out + 1, tl.load(logprobs_ptr + cell))
        tl.store(out + 2, tl.load(policy_ptr + cell))
        tl.store(out + 3, following.to(tl.float64))
        is_good = tl.where(token < 0, 0, is_good)
        at = following
        count += 1
    tl.store(line, (count * is_good).to(tl.float64))


class DeviceSampler:
    """Sampler and verifier on the device, with one wait per step.

    Top-k, top-p, min-p and repetition penalties use the reference implementation, which sorts and waits.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate buffers at first use."""
        self._device = device
        self._staging = Staging(device)

    def sample_and_verify(
        self, logits: Tensor, inputs: StepInputs, columns: BatchState, drafts: DraftTrees
    ) -> VerifiedTokens:
        """Sample and verify as `treering.engine.batch.step_inputs.sample_and_verify` does."""
        rows, leaders = inputs.rows, inputs.leaders
        num_drafts = drafts.offsets[leaders + 1] - drafts.offsets[leaders]
        most = int(num_drafts.max(initial=0))
        if rows.size == 0:
            return _unpack(np.zeros((0, 1 + _PACKED)))
        lengths = 1 + num_drafts
        begins = np.cumsum(lengths) - lengths
        tables = np.stack([begins, drafts.offsets[leaders], num_drafts], 1)
        owner = np.repeat(rows, lengths)
        positions = columns.num_tokens[owner] + _depths(drafts, leaders, num_drafts)
        arrays = [tables, drafts.tokens, drafts.parents, columns.keys[owner], positions, columns.temperature[owner]]
        repetitions = _repetitions_of(inputs, columns, drafts, num_drafts, self._device)
        is_cut = (columns.top_k[rows] > 0) | (columns.top_p[rows] < 1) | (columns.log_min_p[rows] > -np.inf)
        if is_cut.any() or repetitions is not None:
            arrays += [columns.top_k[owner], columns.top_p[owner], columns.log_min_p[owner]]
        # Duplicate rows read some logits more than once, and rows with hidden tokens read their own copies.
        is_direct = np.array_equal(inputs.first_logits, begins)
        wanted = [] if is_direct else [np.repeat(inputs.first_logits - begins, lengths) + np.arange(owner.size)]
        with on_device(self._device):
            values = self._walk_trees(logits, wanted, arrays, repetitions, rows.size, most)
        bad = np.flatnonzero(values[:, 0] == 0)
        if bad.size:
            raise diverged(int(rows[bad[0]]))
        return _unpack(values)

    def _walk_trees(
        self,
        logits: Tensor,
        wanted: list[NDArray[np.int64]],
        arrays: list[NDArray[np.generic]],
        repetitions: Repetitions | None,
        num_rows: int,
        most: int,
    ) -> NDArray[np.float64]:
        """Return the packed lines of all rows, on the host; `wanted` indexes their logits, and empty means all."""
        sent = self._staging.send([*arrays, *wanted])
        read = logits[sent.pop()] if wanted else logits
        tokens, logprobs, policy = _sample_everywhere(read, repetitions, *sent[3:])
        packed = torch.zeros(num_rows, 1 + _PACKED * (1 + most), dtype=torch.float64, device=self._device)
        # Rehearsed chains can be longer than drafts.
        lanes = max(MOST_DRAFTS, 1 << (most - 1).bit_length())
        walk_kernel[(num_rows,)](tokens, logprobs, policy, *sent[:3], packed, most, MOST=lanes, num_warps=1)
        return to_host(packed)


def _sample_everywhere(
    logits: Tensor,
    repetitions: Repetitions | None,
    keys: Tensor,
    positions: Tensor,
    temperature: Tensor,
    *cuts: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens and both log-probabilities at every wanted position."""
    if not cuts:
        samples = gumbel_max(logits, keys, positions, temperature)
        return samples.tokens, samples.logprobs, samples.logprobs
    top_k, top_p, log_min_p = cuts
    sampled = sample(
        logits,
        keys=keys,
        positions=positions,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        log_min_p=log_min_p,
        repetitions=repetitions,
    )
    return sampled.tokens.int(), sampled.logprobs, sampled.policy_logprobs


def _repetitions_of(
    inputs: StepInputs, columns: BatchState, drafts: DraftTrees, num_drafts: Int64Array, device: torch.device
) -> Repetitions | None:
    """Return the tokens that each sampled position repeats, its draft's ancestors included; None without a penalty.

    Positions go row by row: after the row's context, then after each of its drafts.
    """
    penalties = columns.penalty[inputs.rows]
    if (penalties == 1).all():
        return None
    rows, tokens = [], []
    begins = np.cumsum(1 + num_drafts) - (1 + num_drafts)
    for index in np.flatnonzero(penalties != 1):
        row, own = inputs.rows[index], drafts.offsets[inputs.leaders[index]]
        seen = [columns.tokens[row, : columns.num_tokens[row]]]
        for number in range(num_drafts[index]):
            parent = drafts.parents[own + number]
            seen.append(np.append(seen[1 + parent], drafts.tokens[own + number]))
        tokens += seen
        rows.append(np.repeat(begins[index] + np.arange(len(seen)), [some.size for some in seen]))
    at = np.concatenate(rows)
    every = np.repeat(penalties, 1 + num_drafts)
    arrays = at, np.concatenate(tokens).astype(np.int64), every[at]
    return Repetitions(*(torch.from_numpy(array).to(device) for array in arrays))


def _depths(drafts: DraftTrees, rows: NDArray[np.int64], num_drafts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the depth of every wanted position, row by row: 0 after the context, a draft's depth after the draft."""
    lengths = 1 + num_drafts
    starts = np.cumsum(lengths) - lengths
    number = np.arange(lengths.sum()) - np.repeat(starts, lengths) - 1
    depths = np.zeros(number.size, np.int64)
    is_draft = number >= 0
    depths[is_draft] = drafts.depths[(np.repeat(drafts.offsets[rows], lengths) + number)[is_draft]]
    return depths


def _unpack(values: NDArray[np.float64]) -> VerifiedTokens:
    # Tokens are far below 2**53, so float64 represents them exactly.
    parts = values[:, 1:].reshape(values.shape[0], values.shape[1] // _PACKED, _PACKED)
    count = values[:, 0].astype(np.int64)
    path = np.where(np.arange(parts.shape[1]) < count[:, None], parts[:, :, 3], -1)
    return VerifiedTokens(
        tokens=parts[:, :, 0].astype(np.int32),
        logprobs=np.ascontiguousarray(parts[:, :, 1]),
        policy_logprobs=np.ascontiguousarray(parts[:, :, 2]),
        num_tokens=count,
        path=path.astype(np.int32),
    )
