"""Quantised token weights follow full-precision AdaGrad as closely as their units allow, and stay in range."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from treering.history.draft.acceptance import ROOT_UNIT, WEIGHT_UNIT, make_token_weights, move, token_logit
from treering.history.features import FIRST, NUM_GENERAL_KINDS, NUM_KINDS, NUM_TOKEN_WEIGHTS, TOKEN_SIZES

RATE = 0.4


@njit
def move_all(weights: np.ndarray, roots: np.ndarray, gradients: np.ndarray, rate: float) -> None:
    for gradient in gradients:
        move(weights, roots, 7, gradient, rate)


@njit
def logit_of(weights: np.ndarray, features: np.ndarray) -> float:
    return float(token_logit(weights, features))


def moved(gradients: list[float]) -> tuple[float, float]:
    """A weight and its root behind so many steps."""
    weights, roots = make_token_weights()
    move_all(weights, roots, np.array(gradients, np.float64), RATE)
    assert np.count_nonzero(weights) <= 1
    return float(weights[7]) * WEIGHT_UNIT, float(roots[7]) * ROOT_UNIT


def test_each_takes_four_bytes() -> None:
    assert sum(array.nbytes for array in make_token_weights()) == 4 * NUM_TOKEN_WEIGHTS == 4 * sum(TOKEN_SIZES)


def test_a_step_is_that_of_the_worked_example() -> None:
    weight, root = moved([0.5])
    assert weight == 199 / 2048
    assert root == 2111 / 1024


@given(st.lists(st.floats(-1, 1), max_size=200))
def test_a_weight_is_where_full_numbers_would_have_it_but_for_what_is_rounded(gradients: list[float]) -> None:
    weight, squares = 0.0, 4.0
    for gradient in gradients:
        squares += gradient * gradient
        weight += RATE * gradient / math.sqrt(squares)
    found, root = moved(gradients)
    # Half a unit a step. What is rounded of a root is no more than that later on: a longer one changes less.
    lost_root = len(gradients) * ROOT_UNIT / 2
    assert abs(root - math.sqrt(squares)) <= lost_root + 1e-9
    # A root of 2 at least that is off by so much moves each step by that share of it.
    lost = sum((WEIGHT_UNIT + RATE * abs(g) * k * ROOT_UNIT / (2 * 2)) / 2 for k, g in enumerate(gradients, 1))
    assert abs(found - weight) <= lost + 1e-9


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_weight_ends_where_its_numbers_do_and_comes_back(sign: int) -> None:
    weights, roots = make_token_weights()
    move_all(weights, roots, np.full(9, sign * 100.0), 1e3)
    assert weights[7] == sign * 32767
    assert roots[7] == 65535
    move_all(weights, roots, np.full(1, -sign * 0.5), 1e3)
    assert 0 < sign * weights[7] < 32767


def test_the_logit_is_the_sum_of_one_weight_of_each_kind() -> None:
    rng = np.random.default_rng(0)
    weights = rng.integers(-32767, 32768, NUM_TOKEN_WEIGHTS).astype(np.int16)
    for _ in range(20):
        chosen = np.array(FIRST[NUM_GENERAL_KINDS:]) + rng.integers(0, TOKEN_SIZES)
        features = np.full(NUM_KINDS, 10**6, np.int32)
        features[NUM_GENERAL_KINDS:] = chosen
        # Six of at most 2^15: a float32 holds the sum exactly.
        assert logit_of(weights, features) == weights[chosen].astype(int).sum() / 2048
