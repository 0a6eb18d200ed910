"""Group advantages against formulas written out by hand."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.errors import ConfigError, InputError
from treering.rl.advantages import Estimator, group_advantages

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


def by_hand(rewards: list[float], estimator: Estimator) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    if estimator == "grpo":
        return [(reward - mean) / (statistics.stdev(rewards) + 1e-6) for reward in rewards]
    if estimator == "dr_grpo":
        return [reward - mean for reward in rewards]
    others = [[*rewards[:i], *rewards[i + 1 :]] for i in range(len(rewards))]
    return [reward - math.fsum(rest) / len(rest) for reward, rest in zip(rewards, others, strict=True)]


@given(REWARDS.filter(lambda rewards: max(rewards) - min(rewards) > 1e-3), st.sampled_from(ESTIMATORS))
def test_advantages_are_the_formula(rewards: list[float], estimator: Estimator) -> None:
    actual = group_advantages(np.array(rewards), estimator)
    scale = max(1, *map(abs, rewards))
    np.testing.assert_allclose(actual, by_hand(rewards, estimator), rtol=1e-9, atol=1e-12 * scale / 1e-3)


@given(st.floats(-1e6, 1e6), st.integers(1, 9), st.sampled_from(ESTIMATORS))
def test_equal_rewards_have_advantages_of_exactly_zero(reward: float, num: int, estimator: Estimator) -> None:
    assert group_advantages(np.full(num, reward), estimator).tolist() == [0.0] * num


def test_a_group_without_rollouts_has_no_advantages() -> None:
    for estimator in ESTIMATORS:
        assert group_advantages(np.zeros(0), estimator).shape == (0,)


@given(REWARDS, st.sampled_from(ESTIMATORS))
def test_rewards_stay_as_they_were(rewards: list[float], estimator: Estimator) -> None:
    given_rewards = np.array(rewards)
    group_advantages(given_rewards, estimator)
    assert given_rewards.tolist() == rewards


def test_what_is_no_reward_or_estimator_is_refused() -> None:
    for bad in ([1.0, math.nan], [math.inf, 0.0], [[1.0, 0.0]]):
        with pytest.raises(InputError, match="flat list of finite numbers"):
            group_advantages(np.array(bad), "grpo")
    with pytest.raises(ConfigError, match="one of grpo, dr_grpo, rloo, got 'gae'"):
        group_advantages(np.ones(2), "gae")  # type: ignore[arg-type]
