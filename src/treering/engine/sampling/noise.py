"""Compute keyed noise: one uniform number per (rollout, position, token), from a counter-based hash.

A number does not depend on other samples, the batch or the time. `uniforms` is the specification; compiled code gives
the same bits.

    M rows   V vocabulary
"""

import json
import operator
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from treering.types import PromptId, TokenIds

if TYPE_CHECKING:
    from torch import Tensor

# Changing any of these changes every rollout of every run. The steps are odd, so that no two counters share a state,
# and differ, so that neighbouring positions are not shifted copies of each other.
POSITION_STEP = 0x9E3779B97F4A7C15
TOKEN_STEP = 0xD1B54A32D192ED03
# Finaliser of splitmix64.
MIX_SHIFTS = (30, 27, 31)
MIX_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# 52 bits k become (k + 1/2) / 2**52: exact in float64, and never 0 or 1.
NUM_DROPPED_BITS = 12


def call_id(context: TokenIds, num_before: int = 0, agent: str = "") -> int:
    """Return the id of an episode's call: 63 bits of a hash of its context, its agent and the number of earlier calls.

    Concurrent calls therefore have their own noise in any order, and a context that is sampled again gets another
    answer.

    Args:
        context: int32 [N], all tokens before the sampled ones.
        num_before: number of times that the agent sampled this context in the episode before.
        agent: the agent's name.

    Example:
        >>> tokens = np.array([5, 6], np.int32)
        >>> call_id(tokens) == call_id(tokens), call_id(tokens) == call_id(tokens, 1)
        (True, False)
    """
    digest = blake2b(json.dumps([agent, num_before]).encode("ascii"), digest_size=8)
    digest.update(np.ascontiguousarray(context, "<i4").tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1


def row_key(seed: int, prompt_id: PromptId, draw: int, sample: int, call: int | None = None) -> int:
    """Return the noise key of a rollout or a call: a 64-bit hash, signed, so that it fits int64 arrays.

    It is the same on every machine and in every process. An integer prompt id differs from the string of its digits.

    Example:
        >>> row_key(0, "q1", 0, 3), row_key(0, "1", 0, 0) == row_key(0, 1, 0, 0)
        (8783102507430300984, False)
    """
    name = json.dumps(prompt_id) if isinstance(prompt_id, str) else operator.index(prompt_id)
    # This equals json.dumps of the list but takes a quarter of the time; every short rollout needs a key.
    last = "" if call is None else f", {operator.index(call)}"
    text = f"[{operator.index(seed)}, {name}, {operator.index(draw)}, {operator.index(sample)}{last}]"
    return int.from_bytes(blake2b(text.encode("ascii"), digest_size=8).digest(), "little", signed=True)


def uniforms(keys: "Tensor", positions: "Tensor", vocab_size: int) -> "Tensor":
    """Return the noise of every token at one position per rollout, in the open interval (0, 1).

    Args:
        keys: int64 [M], one per rollout, from `row_key`.
        positions: int64 [M], absolute positions of the sampled tokens: prompt length + rollout tokens before each.
        vocab_size: V; the first entries do not depend on it.

    Returns:
        float64 [M, V], on the device of the keys.

    Example:
        >>> import torch
        >>> uniforms(torch.tensor([7]), torch.tensor([0]), 3).numpy().round(4).tolist()
        [[0.717, 0.5827, 0.8047]]
    """
    import torch

    state = _mix(keys + positions * _signed(POSITION_STEP))
    tokens = torch.arange(vocab_size, dtype=torch.int64, device=keys.device)
    bits = _mix(state[:, None] + tokens * _signed(TOKEN_STEP))
    return (_shift_right(bits, NUM_DROPPED_BITS).double() + 0.5) * 2.0 ** (NUM_DROPPED_BITS - 64)


def _mix(bits: "Tensor") -> "Tensor":
    for shift, factor in zip(MIX_SHIFTS, MIX_FACTORS, strict=False):
        bits = (bits ^ _shift_right(bits, shift)) * _signed(factor)
    return bits ^ _shift_right(bits, MIX_SHIFTS[-1])


def _shift_right(bits: "Tensor", count: int) -> "Tensor":
    """Shift right logically; torch's shift is arithmetic."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits
