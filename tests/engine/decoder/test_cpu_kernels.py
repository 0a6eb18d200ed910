"""The CPU loops equal plain formulas for every size and write no other memory."""

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from tests.engine.decoder.vector_cases import DTYPES, Floats, pad_to_vector
from treering.engine.decoder.cpu.kernels import attend, silu_mul, write_keys
from treering.engine.decoder.cpu.simd import exponential, lanes, lanes_of, load, store

ATTENTION_SLACK = 8
"""In units in the last place, because sums run in another order."""


@njit
def exponentials(x: Floats, out: Floats) -> None:
    for at in range(0, x.size, lanes(x)):
        store(out, at, exponential(load(x, at)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponentials_are_within_two_units_in_the_last_place(dtype: np.dtype) -> None:
    least = np.finfo(dtype).minexp * np.log(2)
    x = np.concatenate([np.linspace(least, 80, 1 << 14), np.linspace(-1, 1, 1 << 14)]).astype(dtype)
    x = np.maximum(x, dtype.type(least))
    out = np.empty_like(x)
    exponentials(x, out)
    error = np.abs(out - np.exp(x.astype(np.longdouble)))
    assert (error <= 2 * np.spacing(out)).all()
    assert out[np.flatnonzero(x == 0)].tolist() == [1.0] * int((x == 0).sum())


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponentials_keep_nan_and_have_ends(dtype: np.dtype) -> None:
    x = np.zeros(lanes_of(dtype), dtype)
    x[:5] = [np.nan, -np.inf, np.inf, -1e30, 1e30]
    out = np.empty_like(x)
    exponentials(x, out)
    tiny = np.finfo(dtype).tiny
    assert np.isnan(out[0])
    assert out[1] == out[3]
    assert 0 <= out[1] <= 2 * tiny
    assert out[2] == out[4]
    assert np.isfinite(out[2])
    assert (out[5:] == 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 8, 16, 20, 37])
def test_silu_times_up_is_the_formula_for_every_width(dtype: np.dtype, size: int) -> None:
    gate_up = np.random.default_rng(size).normal(0, 4, (3, 2 * size)).astype(dtype)
    out = pad_to_vector(np.zeros((3, size), dtype))
    silu_mul(pad_to_vector(gate_up), out)
    gate, up = gate_up[:, :size].astype(np.longdouble), gate_up[:, size:].astype(np.longdouble)
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(out, expected.astype(float), rtol=ATTENTION_SLACK * np.finfo(dtype).eps)


class AttentionCase:
    """Tokens after a prefix, in a chain and in a tree, in one arena; invisible slots are NaN."""

    def __init__(self, dtype: np.dtype, head_size: int, num_heads: int, num_kv_heads: int, context: int) -> None:
        rng = np.random.default_rng(head_size + context)
        size = lanes_of(dtype)
        self.num_heads, self.num_kv_heads, self.head_size, self.context = num_heads, num_kv_heads, head_size, context
        self.prefix_start, self.num_prefix = np.array([2, 2, 0]), np.array([5, 5, 0])
        self.own_start, self.num_own = np.array([9, 9, 9]), np.array([context, context + 1, context])
        self.tree_start, self.tree_bits = np.array([0, 0, 9 + context]), np.array([0, 0, 0b101001])
        num_slots = 9 + context + 6
        padded = -(-head_size // size) * size
        self.keys = np.full((num_kv_heads, head_size, num_slots + 2 * size), np.nan, dtype)
        self.values = np.full((num_kv_heads, num_slots, padded), np.nan, dtype)
        for slot in sorted({slot for token in range(3) for slot in self.seen(token)}):
            self.keys[:, :, slot] = rng.normal(size=(num_kv_heads, head_size))
            self.values[:, slot, :head_size] = rng.normal(size=(num_kv_heads, head_size))
        self.qkv = pad_to_vector(rng.normal(size=(3, (num_heads + 2 * num_kv_heads) * head_size)).astype(dtype))
        self.scale = np.array([head_size**-0.5], dtype)

    def seen(self, token: int) -> list[int]:
        prefix = range(self.prefix_start[token], self.prefix_start[token] + self.num_prefix[token])
        own = range(self.own_start[token], self.own_start[token] + self.num_own[token])
        bits = f"{self.tree_bits[token]:b}"[::-1]
        return [*prefix, *own, *(self.tree_start[token] + j for j, bit in enumerate(bits) if bit == "1")]

    def run(self, order: list[int]) -> Floats:
        """Attend for these tokens in one call."""
        out = pad_to_vector(np.zeros((len(order), self.num_heads * self.head_size), self.keys.dtype))
        spans = self.prefix_start, self.num_prefix, self.own_start, self.num_own, self.tree_start, self.tree_bits
        scores = np.full((2, self.context + 200), np.nan, self.keys.dtype)
        qkv = pad_to_vector(self.qkv[order])
        attend(qkv, self.keys, self.values, *(span[order] for span in spans), self.scale, scores, out)
        return out

    def expected(self, token: int) -> NDArray[np.longdouble]:
        heads = self.qkv[token].astype(np.longdouble).reshape(-1, self.head_size)[: self.num_heads]
        result = []
        for head, query in enumerate(heads):
            kv = head * self.num_kv_heads // self.num_heads
            slots = self.seen(token)
            keys, values = self.keys[kv][:, slots].astype(np.longdouble), self.values[kv][slots, : self.head_size]
            scores = query @ keys * self.scale[0]
            weights = np.exp(scores - scores.max())
            result.append(weights / weights.sum() @ values.astype(np.longdouble))
        return np.concatenate(result)


SHAPES = [(2, 2, 1), (16, 3, 1), (24, 2, 1), (32, 4, 2), (8, 10, 2)]
"""Head size, query heads, key-value heads."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context", [1, 16, 77])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_the_softmax_of_what_each_token_sees(
    dtype: np.dtype, shape: tuple[int, int, int], context: int
) -> None:
    case = AttentionCase(dtype, *shape, context)
    actual = case.run([0, 1, 2])
    for token in range(3):
        expected = case.expected(token).astype(float)
        np.testing.assert_allclose(actual[token], expected, rtol=0, atol=20 * ATTENTION_SLACK * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [[2, 1, 0], [1], [0, 0, 2, 1, 1]])
def test_attention_of_a_token_has_the_same_bits_in_every_batch(dtype: np.dtype, order: list[int]) -> None:
    case = AttentionCase(dtype, 32, 4, 2, 19)
    np.testing.assert_array_equal(case.run(order), case.run([0, 1, 2])[order])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [1, 1 << 20, (1 << 63) - 1, -1, -(1 << 63), 0b1011 << 30])
def test_trees_of_up_to_64_drafts_are_seen_by_their_bits(dtype: np.dtype, bits: int) -> None:
    case = AttentionCase(dtype, 32, 4, 2, 5)
    case.tree_bits[2], case.tree_start[2] = bits, 3
    rng = np.random.default_rng(7)
    spare = 2 * lanes_of(dtype)
    case.keys = rng.normal(size=(2, 32, 67 + spare)).astype(dtype)
    case.values = rng.normal(size=(2, 67, 32)).astype(dtype)
    seen = [*range(9, 14), *(3 + j for j in range(64) if bits >> j & 1)]
    case.seen = lambda token: seen  # type: ignore[method-assign]
    np.testing.assert_allclose(
        case.run([2])[0], case.expected(2).astype(float), rtol=0, atol=20 * ATTENTION_SLACK * np.finfo(dtype).eps
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slot", [9, 9 + 20, 9 + 39])
def test_a_dominant_score_takes_all_attention_at_any_position(dtype: np.dtype, slot: int) -> None:
    case = AttentionCase(dtype, 32, 4, 2, 40)
    # e**2000 overflows both dtypes.
    case.keys[:, :, slot] = 0
    case.keys[:, 0, slot] = 2000 / case.scale[0]
    case.qkv[:, ::32] = 1
    np.testing.assert_array_equal(case.run([0])[0].reshape(2, 2, 32), case.values[:, None, slot, :32].repeat(2, axis=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slot", [9, 9 + 39])
def test_a_nan_key_makes_every_token_that_sees_it_nan(dtype: np.dtype, slot: int) -> None:
    case = AttentionCase(dtype, 32, 4, 2, 40)
    case.keys[0, 3, slot] = np.nan
    heads = case.run([0])[0].reshape(2, -1)
    assert np.isnan(heads[0]).all()
    assert np.isfinite(heads[1]).all()


SLACK = 16
"""In units in the last place, for a norm, two products and a sum of numbers up to about 4."""
NUM_HEADS, NUM_KV_HEADS, NUM_SLOTS, NUM_TOKENS = 4, 2, 40, 7
EPS = 1e-6


class Case:
    """Tokens at mixed positions, written to slots in random order."""

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
        """Run these tokens in one call; return heads [T, H + 2 G, D], keys and values. Unwritten slots are NaN."""
        dtype, qkv = self.qkv.dtype, pad_to_vector(self.qkv[tokens])
        keys = np.full((NUM_KV_HEADS, self.head_size, NUM_SLOTS), np.nan, dtype)
        values = np.full((NUM_KV_HEADS, NUM_SLOTS, self.head_size), np.nan, dtype)
        angles, eps = (self.cos, self.sin), np.array([EPS], dtype)
        where = self.positions[tokens], self.slots[tokens]
        write_keys(qkv, self.q_norm, self.k_norm, eps, *angles, *where, keys, values)
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
def test_only_the_diverged_head_is_nan(dtype: np.dtype, head_size: int) -> None:
    case = Case(dtype, head_size, has_norms=True)
    case.qkv[1, 2 * head_size] = np.nan
    heads, _, _ = case.run([0, 1, 2])
    assert np.isnan(heads[1, 2]).all()
    heads[1, 2] = 0
    assert np.isfinite(heads).all()
