"""Importance weights by hand, and the errors of their options."""

import math

import pytest
import torch

from treering.errors import ConfigError
from treering.train.objectives.importance import Importance, ImportanceMode, make_importance


def weights_of(importance: Importance, log_ratios: list[float], branch: list[int] | None = None) -> list[float]:
    target = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True) - 1.0
    branch = list(range(len(log_ratios))) if branch is None else branch
    weights = importance.weights(
        target, torch.full_like(target, -1.0), branch=torch.tensor(branch), num_branches=max(branch) + 1
    )
    assert not weights.requires_grad
    return weights.tolist()


@pytest.mark.parametrize(
    ("target", "behaviour", "cap", "expected"),
    [
        (-1.0, -1.5, 2.0, math.exp(0.5)),
        (-1.0, -3.0, 2.0, 2.0),
        (-3.0, -1.0, 2.0, math.exp(-2.0)),
        (-1.0, -1.0, 0.5, 0.5),
        (-1.0, -3.0, math.inf, math.exp(2.0)),
        (-1.0, -1e30, 3.0, 3.0),
        (-1e30, -1.0, 3.0, math.exp(-20.0)),
    ],
)
def test_a_ratio_above_the_cap_becomes_the_cap(target: float, behaviour: float, cap: float, expected: float) -> None:
    log_probs = [torch.tensor([x], dtype=torch.float64) for x in (target, behaviour)]
    weights = Importance(max_importance=cap).weights(*log_probs, branch=torch.tensor([0]), num_branches=1)
    assert weights.tolist() == pytest.approx([expected], rel=1e-12)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [1.649, 2.0]),
        ("token_mask", [1.649, 0.0]),
        ("sequence_truncate", [2.0, 2.0]),
        ("sequence_mask", [0.0, 0.0]),
    ],
)
def test_the_four_modes_of_the_docstring(mode: ImportanceMode, expected: list[float]) -> None:
    importance = Importance(max_importance=2.0, mode=mode)
    assert weights_of(importance, [0.5, 2.0], [0, 0]) == pytest.approx(expected, abs=1e-3)


def test_a_mask_keeps_ratios_from_bound_to_bound() -> None:
    mask = Importance(max_importance=2.0, min_importance=0.5, mode="token_mask")
    ratios = [0.49, 0.51, 1.0, 1.99, 2.01]
    expected = [0.0, 0.51, 1.0, 1.99, 0.0]
    assert weights_of(mask, [math.log(ratio) for ratio in ratios]) == pytest.approx(expected)


def test_each_sequence_has_its_own_product() -> None:
    importance = Importance(max_importance=math.inf, mode="sequence_truncate")
    weights = weights_of(importance, [0.1, 0.2, -0.4, 0.3], [0, 0, 2, 2])
    assert weights == pytest.approx([math.exp(0.3)] * 2 + [math.exp(-0.1)] * 2)


def test_without_options_there_is_no_weight() -> None:
    assert make_importance(behaviour_logprobs=None, max_importance=None, min_importance=None, mode=None) is None


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"behaviour_logprobs": [[0]]}, "got no max_importance; give both, or none of"),
        ({"max_importance": 2.0}, "got no behaviour_logprobs"),
        ({"min_importance": 0.5}, "got no behaviour_logprobs and no max_importance"),
        ({"mode": "token_mask"}, "got no behaviour_logprobs and no max_importance"),
        ({"behaviour_logprobs": [[0]], "max_importance": 0.0}, r"max_importance is a positive number, got 0\.0"),
        ({"behaviour_logprobs": [[0]], "max_importance": math.nan}, "positive number, got nan"),
        ({"behaviour_logprobs": [[0]], "max_importance": "2"}, "positive number, got '2'"),
        ({"behaviour_logprobs": [[0]], "max_importance": 2.0, "mode": "mask"}, "importance is one of .*, got 'mask'"),
        (
            {"behaviour_logprobs": [[0]], "max_importance": 2.0, "min_importance": 3.0, "mode": "token_mask"},
            r"min_importance is a number from 0 to max_importance=2\.0, got 3\.0",
        ),
        (
            {"behaviour_logprobs": [[0]], "max_importance": 2.0, "min_importance": 0.5},
            "min_importance bounds a mask, and importance='token_truncate' only caps",
        ),
    ],
)
def test_half_given_and_impossible_options_are_refused(options: dict[str, object], message: str) -> None:
    nothing = {"behaviour_logprobs": None, "max_importance": None, "min_importance": None, "mode": None}
    with pytest.raises(ConfigError, match=message):
        make_importance(**{**nothing, **options})  # type: ignore[arg-type]
