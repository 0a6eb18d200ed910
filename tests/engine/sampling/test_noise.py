"""Keyed noise is bitwise the same everywhere, uniform, and independent across rollouts, positions and tokens."""

import hashlib
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from treering.engine.sampling.noise import row_key, uniforms
from treering.types import PromptId

KEYS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.integers(0, 2**40)
# For truly random numbers each statistical bound fails with this probability; the numbers are fixed, so tests never
# flake.
LOG_ODDS = math.log(1e6)
SIDE = 600
"""Numbers along each axis of a block of noise."""


def mix(bits: int) -> int:
    """Apply the finaliser of splitmix64 in unbounded integers."""
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


def expected_uniform(key: int, position: int, token: int) -> float:
    state = mix((key + position * 0x9E3779B97F4A7C15) % 2**64)
    bits = mix((state + token * 0xD1B54A32D192ED03) % 2**64)
    return (2 * (bits >> 12) + 1) / 2**53


def noise(key: int, position: int, vocab_size: int, device: str = "cpu") -> NDArray[np.float64]:
    keys, positions = (torch.tensor([number], dtype=torch.int64, device=device) for number in (key, position))
    return uniforms(keys, positions, vocab_size)[0].cpu().numpy()


AXES: dict[str, Callable[[int], NDArray[np.float64]]] = {
    "tokens": lambda i: noise(3, 40 * i, SIDE),
    "positions": lambda i: noise(3, i, SIDE),
    "keys": lambda i: noise(i, 5, SIDE),
    "high bits of keys": lambda i: noise((i - SIDE // 2) << 52, 5, SIDE),
    "rollouts": lambda i: noise(row_key(0, "q", 0, i), 5, SIDE),
}
"""Row i of a block of noise."""


@cache
def block(axis: str) -> NDArray[np.float64]:
    """Return noise [SIDE, SIDE] whose rows are neighbours along the named axis, which a weak hash would correlate."""
    rows = np.stack([AXES[axis](i) for i in range(SIDE)])
    return rows.T if axis == "tokens" else rows


def chi_square_bound(num_cells: int) -> float:
    """Bound a chi-square of d degrees: by Laurent and Massart, P(x > d + 2 sqrt(d t) + 2 t) < exp(-t)."""
    degrees = num_cells - 1
    return degrees + 2 * math.sqrt(degrees * LOG_ODDS) + 2 * LOG_ODDS


@given(KEYS, POSITIONS, st.integers(1, 40))
def test_the_noise_has_the_bits_of_the_definition(key: int, position: int, vocab_size: int) -> None:
    expected = np.array([expected_uniform(key, position, token) for token in range(vocab_size)])
    np.testing.assert_array_equal(noise(key, position, vocab_size), expected)


@pytest.mark.gpu
def test_cuda_gives_the_same_bits() -> None:
    for key in (0, -1, 2**63 - 1, -(2**63), row_key(0, "q", 0, 0)):
        np.testing.assert_array_equal(noise(key, 77, 5000, "cuda"), noise(key, 77, 5000))


@given(KEYS, POSITIONS)
def test_no_number_is_0_or_1(key: int, position: int) -> None:
    # An odd multiple of 2**-53 is neither 0 nor 1, and is exact in float64.
    parts = noise(key, position, 64) * 2.0**53
    assert np.all(parts % 2 == 1)
    assert parts.min() > 0
    assert parts.max() < 2**53


@pytest.mark.parametrize("axis", list(AXES))
def test_the_numbers_are_uniform(axis: str) -> None:
    ordered = np.sort(block(axis).ravel())
    num = ordered.size
    largest_gap = np.abs(ordered - (np.arange(num) + 0.5) / num).max() + 0.5 / num
    # Dvoretzky, Kiefer, Wolfowitz: P(gap > e) <= 2 exp(-2 n e**2).
    assert largest_gap <= math.sqrt((LOG_ODDS + math.log(2)) / (2 * num))


@pytest.mark.parametrize("axis", list(AXES))
@pytest.mark.parametrize("lag", [1, 2, 8])
def test_neighbours_are_independent(axis: str, lag: int) -> None:
    cells = (block(axis) * 16).astype(np.int64)
    pairs = np.bincount((cells[lag:] * 16 + cells[:-lag]).ravel(), minlength=256)
    expected = pairs.sum() / 256
    assert ((pairs - expected) ** 2 / expected).sum() <= chi_square_bound(256)


def test_keys_are_distinct_and_fit_int64() -> None:
    prompt_ids: list[PromptId] = [
        0,
        1,
        -1,
        2**70,
        "0",
        "1",
        "-1",
        "",
        "q",
        'q"',
        "ü",
        "\ud800",
        "1, 1",
        "[0]",
        10,
        "10",
    ]
    names = itertools.product(range(5), prompt_ids, range(25), range(50))
    keys = [row_key(*name) for name in names]
    assert len(keys) == 100_000
    assert np.unique(np.array(keys, np.int64)).size == len(keys)


def test_keys_are_the_same_in_every_release() -> None:
    assert row_key(0, "q1", 0, 3) == 8783102507430300984
    assert row_key(17, 4, 2, 1) == -6386863194563414227


@given(seed=st.integers(), prompt_id=st.text() | st.integers(), draw=st.integers(0), sample=st.integers(0))
def test_a_key_is_a_hash_of_its_name_as_json(seed: int, prompt_id: PromptId, draw: int, sample: int) -> None:
    written = json.dumps([seed, prompt_id, draw, sample]).encode("ascii")
    expected = int.from_bytes(hashlib.blake2b(written, digest_size=8).digest(), "little", signed=True)
    assert row_key(seed, prompt_id, draw, sample) == expected


def test_noise_needs_no_torch() -> None:
    probe = "import sys, treering.engine.sampling.noise; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=500)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("axis", list(AXES))
def test_neighbours_are_not_shifted_copies(axis: str) -> None:
    assert np.unique(block(axis)).size == SIDE * SIDE
