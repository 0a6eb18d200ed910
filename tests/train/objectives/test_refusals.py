"""Objective options that contradict each other, lack their counterpart or have no meaning are refused by name."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from treering.config.objective_names import check_name
from treering.errors import ConfigError, InputError
from treering.objectives import Objective, cispo, dapo, dpo, dr_grpo, grpo, gspo, ppo, register, rloo
from treering.train.objectives import find_objective

GIVEN = ([2.0, -1.0, 1.0], [[0, 1, 1], [0, 0, 1], [0]], [[0.0, -2.0, -3.5], [0.0, math.nan, -2.5], [0.0]])
ONES = [[0]]
MAKERS = [grpo, dapo, dr_grpo, gspo, cispo, rloo, ppo]
SAMPLED = {"behaviour_logprobs": ONES, "max_importance": 2.0}
REFERENCE = {"ref_logprobs": ONES, "kl_coefficient": 0.1}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (grpo, {"behaviour_logprobs": ONES}, "missing: max_importance; set both, or none of"),
        (grpo, {"max_importance": 2.0}, "missing: behaviour_logprobs"),
        (grpo, {"min_importance": 0.5}, "missing: behaviour_logprobs and max_importance"),
        (grpo, {"importance": "token_mask"}, "missing: behaviour_logprobs and max_importance"),
        (grpo, SAMPLED | {"max_importance": 0.0}, r"max_importance must be a positive number, got 0\.0"),
        (grpo, SAMPLED | {"max_importance": "2"}, "positive number, got '2'"),
        (grpo, SAMPLED | {"importance": "mask"}, "importance must be one of .*, got 'mask'"),
        (grpo, SAMPLED | {"min_importance": 3.0, "importance": "token_mask"}, r"from 0 to max_importance=2\.0, got 3"),
        (grpo, SAMPLED | {"min_importance": 0.5}, "applies to masks only, and importance='token_truncate' only caps"),
        (grpo, {"ref_logprobs": ONES}, "missing: kl_coefficient; set both, or none of"),
        (grpo, {"kl_coefficient": 0.1}, "missing: ref_logprobs"),
        (grpo, {"kl_estimator": "k3"}, "missing: ref_logprobs and kl_coefficient"),
        (
            grpo,
            REFERENCE | {"kl_coefficient": -0.1},
            r"kl_coefficient must be a finite number of at least 0, got -0\.1",
        ),
        (grpo, REFERENCE | {"kl_estimator": "k4"}, "one of k1, k2, k3, got 'k4'"),
        (grpo, {"entropy_coefficient": math.inf}, "entropy_coefficient must be a finite number of at least 0, got inf"),
        (grpo, {"zzz": 1}, r"grpo has no option 'zzz'; choose .*kl_estimator, entropy_coefficient"),
        (ppo, {"retruns": 1}, "ppo has no option 'retruns'; did you mean 'returns'"),
        (ppo, {"old_values": ONES, "value_clip": 0.2}, "old_values and value_clip belong to a value loss"),
        (ppo, {"returns": [0], "value_clip": 0.2}, "needs old_values and value_clip, and old_values is missing"),
        (
            ppo,
            {"returns": [0], "old_values": ONES, "value_clip": 0.0},
            r"value_clip must be a positive number, got 0\.0",
        ),
        (
            ppo,
            {"returns": [0], "value_coefficient": -1.0},
            r"value_coefficient must be a finite number of at least 0, got -1",
        ),
        (gspo, {"shared": "once"}, 'gspo supports only shared="sum", got shared="once"; its ratio covers a whole'),
        (rloo, {"shared": "once"}, 'rloo supports only shared="sum", got shared="once"; its ratio covers a whole'),
        (cispo, SAMPLED | {"importance": "sequence_mask", "shared": "once"}, 'cispo supports only shared="sum"'),
        (
            dr_grpo,
            {"normalizer": "token_mean", "divisor": 9.0},
            "divisor must be set if and only if normalizer is 'constant'",
        ),
    ],
)
def test_policy_options_without_a_meaning_are_refused(
    make: Callable[..., Objective], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(*GIVEN, **options)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("make", MAKERS)
def test_every_policy_objective_needs_masks_a_sane_clip_and_known_options(make: Callable[..., Objective]) -> None:
    with pytest.raises(ConfigError, match=f"{make.__name__} has no option 'normaliser'; did you mean 'normalizer'"):
        make(*GIVEN, normaliser=1.0)
    with pytest.raises(InputError, match=f"{make.__name__} needs loss_masks"):
        make([1.0], None)
    for old in (None, [[0, -1]]):
        for clip in ((0.2, -0.1), (1.5, 0.2), 0.2, None, (0.1,), ("a", "b"), (0.2, math.inf)):
            with pytest.raises(ConfigError, match=r"clip must be \(low, high\)"):
                make([1.0], [[0, 1]], old, clip=clip)


def test_gspo_refuses_once_on_policy_too_and_rloo_does_not() -> None:
    with pytest.raises(ConfigError, match='gspo supports only shared="sum"'):
        gspo([1.0], [[0, 1]], shared="once")
    assert rloo([1.0], [[0, 1]], shared="once").scope == "entry"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            ([(0, 1, 2)],),
            {},
            r"pairs must be a list of \(chosen, rejected\) branch numbers, got int64 of shape \(1, 3\)",
        ),
        (([(0, 1), (0,)],), {}, "got a ragged list"),
        (([(0.0, 1.0)],), {}, "got float64 of shape"),
        (([(0, 1), (2, 2)],), {}, "pair 1 holds 2 twice"),
        (([(0, -1)],), {}, "numbered from 0, forests in order, then sequences, got -1"),
        (([(0, 1)], None, 3.0), {}, "ref_logprobs must be a list with one item per branch, got float"),
        (([(0, 1)],), {"beta": 0.0}, r"beta must be a positive number, got 0\.0"),
        (([(0, 1)],), {"label_smoothing": 0.5}, r"from 0 to below 0\.5, got 0\.5"),
        (([(0, 1)],), {"loss_type": "kto"}, "loss_type must be one of sigmoid, hinge, ipo, got 'kto'"),
        (
            ([(0, 1)],),
            {"loss_type": "ipo", "label_smoothing": 0.1},
            'label_smoothing applies only to loss_type="sigmoid"',
        ),
        (
            ([(0, 1)],),
            {"shared": "once"},
            'dpo supports only shared="sum", got shared=.once.; it compares whole sequences',
        ),
    ],
)
def test_pairs_and_options_of_dpo_without_a_meaning_are_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, InputError), match=message):
        dpo(*arguments, **options)


def test_a_run_names_losses_of_rollouts_and_registered_ones() -> None:
    @register
    def reinforce(advantages: object, loss_masks: object, old_logprobs: object = None) -> None: ...

    assert [find_objective(name) for name in ("grpo", "reinforce")] == [grpo, reinforce]
    with pytest.raises(ConfigError, match="got 'ppo'; it needs a value head"):
        find_objective("ppo")
    with pytest.raises(ConfigError, match=r"cispo, dapo, .*, got 'gropo'; did you mean 'grpo'"):
        check_name("gropo")
    reinforce.__name__ = "dpo"
    with pytest.raises(ConfigError, match="dpo is built in; rename the function"):
        register(reinforce)
