"""The CPU loops between matrix products against plain formulas."""

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.decoder.vector_cases import DTYPES, Floats, pad_to_vector
from treering.engine.decoder.cpu.kernels import write_keys

SLACK = 16
"""Units in the last place: of a norm, two products and a sum, each of numbers up to about 4."""
NUM_HEADS, NUM_KV_HEADS, NUM_SLOTS, NUM_TOKENS = 4, 2, 40, 7
EPS = 1e-6


class Case:
    """Tokens at mixed positions, for slots in no order."""

    def __init__(self, dtype: np.dtype, head_size: int, *, has_norms: bool) -> None:
        rng = np.random.default_rng(head_size)
        width = (NUM_HEADS + 2 * NUM_KV_HEADS) * head_size
        self.head_size = head_size
        self.qkv = rng.normal(size=(NUM_TOKENS, width)).astype(dtype)
        angles = np.tile(rng.normal(size=(50, head_size // 2)), 2)
        self.cos, self.sin = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
        size = head_size if has_norms else 0
        self.q_norm, self.k_norm = rng.normal(size=(2, size)).astype(dtype)
        self.positions, self.slots = rng.integers(0, 50, NUM_TOKENS), rng.permutation(NUM_SLOTS)[:NUM_TOKENS]

    def run(self, tokens: list[int]) -> tuple[Floats, Floats, Floats]:
        """Heads [T, H + 2 G, D] after one call with these tokens, and the arena's keys and values; NaN is unwritten."""
        dtype, qkv = self.qkv.dtype, pad_to_vector(self.qkv[tokens])
        keys = np.full((NUM_KV_HEADS, self.head_size, NUM_SLOTS), np.nan, dtype)
        values = np.full((NUM_KV_HEADS, NUM_SLOTS, self.head_size), np.nan, dtype)
        angles, eps = (self.cos, self.sin), np.array([EPS], dtype)
        places = self.positions[tokens], self.slots[tokens]
        write_keys(qkv, self.q_norm, self.k_norm, eps, *angles, *places, keys, values)
        return qkv.reshape(len(tokens), -1, self.head_size), keys, values

    def expected(self) -> NDArray[np.longdouble]:
        heads = self.qkv.astype(np.longdouble).reshape(NUM_TOKENS, -1, self.head_size)
        turned = heads[:, : NUM_HEADS + NUM_KV_HEADS]
        if self.q_norm.size:
            turned = turned / np.sqrt((turned**2).mean(-1, keepdims=True) + EPS)
            turned[:, :NUM_HEADS] *= self.q_norm
            turned[:, NUM_HEADS:] *= self.k_norm
        first, second = np.split(turned, 2, axis=-1)
        cos, sin = self.cos[self.positions, None], self.sin[self.positions, None]
        turned = turned * cos + np.concatenate([-second, first], axis=-1) * sin
        return np.concatenate([turned, heads[:, NUM_HEADS + NUM_KV_HEADS :]], axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("head_size", [2, 16, 24, 32, 128])
def test_heads_are_normed_and_rotated_and_keys_and_values_are_in_their_slots(
    dtype: np.dtype, has_norms: bool, head_size: int
) -> None:
    case = Case(dtype, head_size, has_norms=has_norms)
    heads, keys, values = case.run(list(range(NUM_TOKENS)))
    atol = SLACK * np.finfo(dtype).eps
    np.testing.assert_allclose(heads, case.expected().astype(float), rtol=SLACK * np.finfo(dtype).eps, atol=atol)
    first, behind = NUM_HEADS, NUM_HEADS + NUM_KV_HEADS
    np.testing.assert_array_equal(keys[:, :, case.slots], heads[:, first:behind].transpose(1, 2, 0))
    np.testing.assert_array_equal(values[:, case.slots], heads[:, behind:].transpose(1, 0, 2))
    others = np.setdiff1d(np.arange(NUM_SLOTS), case.slots)
    assert np.isnan(keys[:, :, others]).all()
    assert np.isnan(values[:, others]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [24, 32])
def test_keys_of_a_token_have_the_same_bits_in_every_batch(dtype: np.dtype, head_size: int) -> None:
    case = Case(dtype, head_size, has_norms=True)
    together = case.run(list(range(NUM_TOKENS)))[0]
    for token in range(NUM_TOKENS):
        np.testing.assert_array_equal(case.run([token])[0][0], together[token])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [24, 32])
def test_a_diverged_head_is_nan_alone(dtype: np.dtype, head_size: int) -> None:
    case = Case(dtype, head_size, has_norms=True)
    case.qkv[1, 2 * head_size] = np.nan
    heads, _, _ = case.run([0, 1, 2])
    assert np.isnan(heads[1, 2]).all()
    heads[1, 2] = 0
    assert np.isfinite(heads).all()
