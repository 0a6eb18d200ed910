"""Group advantages against formulas written out by hand."""

import decimal
import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.errors import ConfigError, InputError
from treering.rl.advantages import EPSILON, Estimator, group_advantages

ESTIMATORS: tuple[Estimator, ...] = ("grpo", "dr_grpo", "rloo")
REWARDS = st.lists(st.floats(-100, 100), min_size=2, max_size=9)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [0.75 / (0.5 + 1e-6), *[-0.25 / (0.5 + 1e-6)] * 3]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_the_worked_example(estimator: Estimator, expected: list[float]) -> None:
    assert group_advantages(np.array([1.0, 0, 0, 0]), estimator).tolist() == pytest.approx(expected, rel=1e-12)


@given(st.floats(-1e6, 1e6), st.integers(1, 9), st.sampled_from(ESTIMATORS))
def test_equal_rewards_have_advantages_of_exactly_zero(reward: float, num: int, estimator: Estimator) -> None:
    assert group_advantages(np.full(num, reward), estimator).tolist() == [0.0] * num


HUGE = st.floats(-1e300, 1e300) | st.builds(
    lambda mantissa, exponent: mantissa * 10.0**exponent, st.floats(-9, 9), st.integers(-300, 299)
)
"""Numbers of one magnitude, and numbers of all magnitudes."""


@given(st.lists(HUGE, min_size=2, max_size=9), st.sampled_from(ESTIMATORS))
def test_advantages_of_rewards_of_any_size_are_the_formula(rewards: list[float], estimator: Estimator) -> None:
    with decimal.localcontext(prec=700, Emax=9999, Emin=-9999):
        exact = [Decimal(reward) for reward in rewards]
        mean = sum(exact) / len(exact)
        deviation = (sum((reward - mean) ** 2 for reward in exact) / (len(exact) - 1)).sqrt()
        divisor = deviation + Decimal(EPSILON) if estimator == "grpo" else Decimal(1)
        factor = Decimal(len(exact)) / (len(exact) - 1) if estimator == "rloo" else Decimal(1)
        # A mean of G numbers is rounded G times, each time by half a unit of the largest at most.
        rounding = Decimal(len(exact) * np.finfo(np.float64).eps) * max(map(abs, exact)) / divisor
        expected = [(reward - mean) / divisor * factor for reward in exact]
        for actual, value in zip(group_advantages(np.array(rewards), estimator).tolist(), expected, strict=True):
            relative = rounding if estimator == "grpo" else Decimal(0)
            tolerance = 2 * rounding + abs(value) * (relative + Decimal("1e-15"))
            assert abs(Decimal(actual) - value) <= tolerance + Decimal("5e-324")


def test_differences_that_float64_cannot_hold_are_refused() -> None:
    rewards = np.array([1.7e308, -1.7e308])
    for estimator in ("rloo", "dr_grpo"):
        values = rewards if estimator == "rloo" else np.array([1.7e308, *[-1.7e308] * 9])
        with pytest.raises(InputError, match="float64 must hold the differences"):
            group_advantages(values, estimator)  # type: ignore[arg-type]
    assert group_advantages(rewards, "grpo").tolist() == pytest.approx([2**-0.5, -(2**-0.5)])


def test_an_unknown_reward_or_estimator_is_refused() -> None:
    for bad in ([1.0, math.nan], [math.inf, 0.0], [[1.0, 0.0]]):
        with pytest.raises(InputError, match="flat list of finite numbers"):
            group_advantages(np.array(bad), "grpo")
    with pytest.raises(ConfigError, match="one of grpo, dr_grpo, rloo, got 'gae'"):
        group_advantages(np.ones(2), "gae")  # type: ignore[arg-type]
