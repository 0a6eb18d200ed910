"""Gumbel-max sampling on the device, as in `engine.sampling.reference`, without a [W, V] array besides the logits.

Computes noise and probabilities in float64 inside the kernel, so tokens equal the reference's up to near-ties.

    W wanted positions   V vocabulary   N tiles of V
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from treering.engine.sampling.noise import MIX_FACTORS, MIX_SHIFTS, NUM_DROPPED_BITS, POSITION_STEP, TOKEN_STEP

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
    """Per tile of a position's logits: the maximum, the sum of exponentials relative to it, and the Gumbel-max token.

    A tile with NaN or +inf has a peak of +inf. Grid (W, N).
    """
    wanted, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    is_token = token < VOCABULARY
    logits = tl.load(logits_ptr + wanted * VOCABULARY + token, mask=is_token, other=float("-inf")).to(tl.float64)
    is_bad = (logits != logits) | (logits == float("inf"))
    peak = tl.where(tl.max(is_bad.to(tl.int32), 0) > 0, float("inf"), tl.max(tl.where(is_bad, 0.0, logits), 0))
    # A tile without finite logits has no winner; this only avoids NaN.
    shift = tl.where((peak == float("inf")) | (peak == float("-inf")), 0.0, peak)
    scaled = (tl.where(is_bad, 0.0, logits) - shift) / tl.load(temperature_ptr + wanted)
    weight = tl.exp(scaled)
    zero = tl.zeros([TILE], tl.uint64)
    key = zero + tl.load(keys_ptr + wanted).to(tl.uint64, bitcast=True)
    position = zero + tl.load(positions_ptr + wanted).to(tl.uint64)
    state = _mixed(key + position * POSITION, FIRST, SECOND, S0, S1, S2)
    bits = _mixed(state + token.to(tl.uint64) * TOKEN, FIRST, SECOND, S0, S1, S2) >> DROPPED
    # 52 bits or fewer: half of 2**-52 more, as `uniforms` says.
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    score = tl.where(is_token, weight / -tl.log(uniform), -1.0)
    best = tl.max(score, 0)
    winner = tl.min(tl.where(score == best, token, VOCABULARY), 0)
    place = wanted * num_tiles + tile
    tl.store(peaks_ptr + place, peak)
    tl.store(totals_ptr + place, tl.sum(tl.where(is_token, weight, 0.0), 0))
    tl.store(bests_ptr + place, best)
    tl.store(winners_ptr + place, winner)


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
    """The best token of all tiles and its log-probability; token -1 for invalid logits. Grid (W,)."""
    wanted = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, PADDED)
    is_tile = tile < num_tiles
    place = wanted * num_tiles + tile
    peaks = tl.load(peaks_ptr + place, mask=is_tile, other=float("-inf"))
    peak = tl.max(peaks, 0)
    is_bad = (peak == float("inf")) | (peak == float("-inf"))
    is_finite = is_tile & (peaks > float("-inf")) & (peaks < float("inf"))
    temperature = tl.load(temperature_ptr + wanted)
    shift = tl.where(is_bad, 0.0, peak)
    factor = tl.where(is_finite, tl.exp((tl.where(is_finite, peaks, shift) - shift) / temperature), 0.0)
    total = tl.sum(tl.load(totals_ptr + place, mask=is_tile, other=0.0) * factor, 0)
    score = tl.where(is_tile, tl.load(bests_ptr + place, mask=is_tile, other=0.0) * factor, -1.0)
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
    """Samples one token per row as `reference.sample` does without top-k and top-p, in two kernels and without waiting.

    Args:
        logits: [W, V] before temperature, contiguous; any float type.
        keys: int64 [W], of the rows' rollouts.
        positions: int64 [W], absolute positions of the sampled tokens.
        temperature: float64 [W], > 0.

    Example: equal logits give each of 4 tokens the log-probability -1.386.
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
