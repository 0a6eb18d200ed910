"""The lookup tables agree with their docstrings."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from treering.history import features

LASTS = {
    "length_bucket": (0, 1, 2, 3, 4, 6, 9, 14, 22, 40),
    "edit_bucket": (0, 2, 4, 8),
    "depth_bucket": (0, 1, 2, 4, 8, 16),
    "near_bucket": (0, 2, 4),
    "count_bucket": (1, 2, 4),
}
"""Upper end of each bucket except the last."""


def python(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(features, name).py_func
    return function


@pytest.mark.parametrize("name", LASTS)
def test_a_bucket_is_how_many_buckets_end_below_a_number(name: str) -> None:
    for number in range(200):
        assert python(name)(number) == sum(number > last for last in LASTS[name]), number


def test_shifts_to_either_side_share_a_bucket_and_bucket_0_is_left_free() -> None:
    for shift in range(-200, 201):
        assert python("shift_bucket")(shift) == 1 + sum(abs(shift) > last for last in (0, 2, 8, 32)), shift
    assert python("shift_bucket")(10**6) == features.FAR


def test_the_logistic_is_looked_up_to_the_error_of_a_straight_line() -> None:
    # Linear interpolation over a step h errs by h**2 / 8 times the second derivative, which is at most the value
    # itself.
    for logit in np.linspace(-12, 12, 5001):
        assert python("squash")(logit) == pytest.approx(1 / (1 + math.exp(-logit)), rel=1 / (8 * 64**2) + 1e-12)
