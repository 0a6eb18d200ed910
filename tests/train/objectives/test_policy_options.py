"""The shared options of policy objectives: names, metrics, and errors before any gradient."""

import math
import re
from collections.abc import Callable

import numpy as np
import pytest

from tests.models import assert_gradients_equal, build_float64, take_gradients
from treering.errors import ConfigError, InputError
from treering.train.gradient.backward import backward
from treering.train.objectives import Objective, cispo, dapo, dr_grpo, grpo, gspo, ppo, rloo
from treering.tree.forest import Forest

MODEL = build_float64()
FOREST = Forest.from_sequences([[5, 6, 7], [5, 6, 8], [5]])
MASKS = [[0, 1, 1], [0, 0, 1], [0]]
OLD = [[0.0, -2.0, -3.5], [0.0, math.nan, -2.5], [0.0]]
REF = [[math.nan, -3.0, -3.2], [0.0, math.nan, -6.0], [math.nan]]
ADVANTAGES = [2.0, -1.0, 1.0]
MAKERS = [grpo, dapo, dr_grpo, gspo, cispo, rloo, ppo]


@pytest.mark.parametrize("make", MAKERS)
def test_an_unknown_option_is_refused_with_the_nearest(make: Callable[..., Objective]) -> None:
    with pytest.raises(ConfigError, match=f"{make.__name__} has no option 'normaliser'; did you mean 'normalizer'"):
        make(ADVANTAGES, MASKS, normaliser=1.0)


def test_an_option_like_no_other_is_refused_with_all() -> None:
    with pytest.raises(ConfigError, match=r"grpo has no option 'zzz'; choose .*kl_estimator, entropy_coefficient"):
        grpo(ADVANTAGES, MASKS, zzz=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="ppo has no option 'value_clips'; did you mean 'value_clip'"):
        ppo(ADVANTAGES, MASKS, value_clips=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("make", MAKERS)
def test_options_that_are_none_change_nothing(make: Callable[..., Objective]) -> None:
    names = ("behaviour_logprobs", "max_importance", "importance", "ref_logprobs", "kl_coefficient", "kl_estimator")
    plain = backward(MODEL, FOREST, make(ADVANTAGES, MASKS, OLD))
    expected = take_gradients(MODEL)
    same = backward(MODEL, FOREST, make(ADVANTAGES, MASKS, OLD, **dict.fromkeys(names), entropy_coefficient=None))
    assert (same.loss, same.averages) == (plain.loss, plain.averages)
    assert_gradients_equal(take_gradients(MODEL), expected, 0.0)


@pytest.mark.parametrize("make", MAKERS)
def test_coefficients_of_zero_measure_and_change_nothing(make: Callable[..., Objective]) -> None:
    plain = backward(MODEL, FOREST, make(ADVANTAGES, MASKS, OLD))
    expected = take_gradients(MODEL)
    measured = backward(
        MODEL, FOREST, make(ADVANTAGES, MASKS, OLD, entropy_coefficient=0.0, ref_logprobs=REF, kl_coefficient=0.0)
    )
    assert measured.loss == pytest.approx(plain.loss, rel=1e-14)
    assert measured.averages.keys() - plain.averages.keys() == {"entropy", "kl"}
    assert 0 < measured.averages["entropy"] < math.log(32)
    assert measured.averages["kl"] > 0
    assert_gradients_equal(take_gradients(MODEL), expected, 1e-14)


def test_reference_values_are_checked_where_a_token_is_trained() -> None:
    bad = [[0, math.inf, -1], [0, 0, -1], [0]]
    for options in (
        {"ref_logprobs": bad, "kl_coefficient": 0.1},
        {"behaviour_logprobs": bad, "max_importance": 2.0},
    ):
        with pytest.raises(InputError, match=r"_logprobs\[0\] must be finite where a token is trained, got inf"):
            backward(MODEL, FOREST, grpo(ADVANTAGES, MASKS, OLD, **options))  # type: ignore[arg-type]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("make", MAKERS)
def test_every_policy_objective_needs_masks_and_a_sane_clip(make: Callable[..., Objective]) -> None:
    with pytest.raises(InputError, match=f"{make.__name__} needs loss_masks"):
        make([1.0], None)
    for old in (None, [[0, -1]]):
        for clip in ((0.2, -0.1), (1.5, 0.2), 0.2, None, (0.1,), ("a", "b"), (0.2, math.inf)):
            with pytest.raises(ConfigError, match=rf"clip must be \(low, high\).*got {re.escape(repr(clip))}"):
                make([1.0], [[0, 1]], old, clip=clip)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("old_logprobs", lambda numbers, masks: grpo([1.0, 1.0], masks, numbers)),
        ("ref_logprobs", lambda numbers, masks: gspo([1.0, 1.0], masks, ref_logprobs=numbers, kl_coefficient=1.0)),
        (
            "behaviour_logprobs",
            lambda numbers, masks: cispo([1.0, 1.0], masks, behaviour_logprobs=numbers, max_importance=2.0),
        ),
    ],
)
def test_one_log_probability_for_a_whole_sequence_is_refused(name: str, make: Callable[..., Objective]) -> None:
    objective = make([-6.0, -6.0], [[0, 1, 1], [0, 1, 1]])
    with pytest.raises(
        InputError, match=rf"{name}\[0\] needs a list with one number per token \(3\), got the number -6.0"
    ):
        objective.flat_values(np.array([3, 3]), trained=np.ones(6, bool))
