"""Weights of single tokens and of tokens after others, 4 bytes each: they are many, and few are ever used.

A weight is a whole number of 2048ths, and its AdaGrad root one of 1024ths, both rounded at every step. Full floats give
no better estimates.
"""

import numpy as np

from treering.arrays import Int16Array, Int32Array, UInt16Array
from treering.history.features import NUM_GENERAL_KINDS, NUM_KINDS, NUM_TOKEN_WEIGHTS
from treering.lean import lean

WEIGHT_UNIT = 1 / 2048
ROOT_UNIT = 1 / 1024
_FIRST_ROOT = 2.0
MOST_UNITS = 32767
MOST_ROOT_UNITS = 65535


def make_token_weights() -> tuple[Int16Array, UInt16Array]:
    """Weights of 0, in units of `WEIGHT_UNIT`, and the roots that they begin with, in units of `ROOT_UNIT`."""
    weights = np.zeros(NUM_TOKEN_WEIGHTS, np.int16)
    return weights, np.full(NUM_TOKEN_WEIGHTS, _FIRST_ROOT / ROOT_UNIT, np.uint16)


@lean
def token_logit(weights: Int16Array, features: Int32Array) -> np.float32:
    """What a candidate's tokens add to its logit.

    Args:
        weights: see `make_token_weights`.
        features: int32 [kinds]; the last ones are of tokens.

    Example: weights of 2048, 0, 0, 0, -1024 and 0 units add up to 0.5.
    """
    total = np.int32(0)
    for k in range(NUM_GENERAL_KINDS, NUM_KINDS):
        total += weights[np.uintp(features[k])]
    return np.float32(total) * np.float32(WEIGHT_UNIT)


@lean
def move(weights: Int16Array, roots: UInt16Array, k: int, gradient: float, rate: float) -> None:
    """One step of AdaGrad of one weight, to the nearest unit.

    Example: with a root of 2 and a rate of 0.4 a gradient of 0.5 moves a weight by 0.4 * 0.5 / sqrt(4 + 0.25) = 0.097,
    which is 199 units, and the root is 2.062 then, which is 2111.
    """
    at = np.uintp(k)
    held = roots[at] * ROOT_UNIT
    root = np.sqrt(held * held + gradient * gradient)
    moved = weights[at] + rate * gradient / (root * WEIGHT_UNIT)
    roots[at] = int(min(root / ROOT_UNIT + 0.5, MOST_ROOT_UNITS))
    weights[at] = int(np.floor(min(max(moved, -MOST_UNITS), MOST_UNITS) + 0.5))
