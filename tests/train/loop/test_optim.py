"""The learning-rate schedule's formula, weight decay by parameter, and clipping by the global norm."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from treering.config.optim import OptimOptions
from treering.errors import ConfigError, StateError
from treering.train.loop.update import clip_gradients, learning_rate_at, make_optimizer

STEPS = range(1, 9)


def rates(**options: object) -> list[float]:
    chosen = OptimOptions(**({"learning_rate": 1.0} | options))  # type: ignore[arg-type]
    return [learning_rate_at(step, chosen) for step in STEPS]


def with_gradients(*values: list[float] | None) -> list[nn.Parameter]:
    weights = [nn.Parameter(torch.zeros(2 if value is None else len(value))) for value in values]
    for weight, value in zip(weights, values, strict=True):
        weight.grad = None if value is None else torch.tensor(value)
    return weights


def test_warm_up_rises_linearly_from_zero_and_reaches_the_rate_at_its_last_step() -> None:
    assert rates() == [1.0] * 8
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_cosine_falls_from_the_rate_to_its_floor_at_the_last_step_and_stays_there() -> None:
    # The cosines of 0, 45, 90, 135 and 180 degrees, scaled to [0.2, 1].
    root = math.sqrt(0.5)
    expected = [0.5, 1.0, 0.6 + 0.4 * root, 0.6, 0.6 - 0.4 * root, 0.2, 0.2, 0.2]
    found = rates(schedule="cosine", warmup_steps=2, num_steps=6, min_learning_rate=0.2)
    assert found == pytest.approx(expected, abs=1e-12)


def test_a_linear_schedule_falls_by_equal_parts_to_its_floor_at_the_last_step() -> None:
    found = rates(schedule="linear", warmup_steps=2, num_steps=6, min_learning_rate=0.2)
    assert found == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2], abs=1e-12)


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 3), nn.LayerNorm(3))
    optimizer = make_optimizer(model, OptimOptions(learning_rate=0.1, weight_decay=0.5))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {"0.weight", "1.weight"}
    torch.testing.assert_close(model[1].weight.detach(), before["1.weight"] * (1 - 0.1 * 0.5))


def test_frozen_parameters_are_left_out_and_a_model_without_others_is_refused() -> None:
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    [group] = make_optimizer(model, OptimOptions(learning_rate=0.1)).param_groups
    assert [weight is model.weight for weight in group["params"]] == [True]
    model.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="Linear has no parameter with requires_grad=True"):
        make_optimizer(model, OptimOptions(learning_rate=0.1))


@pytest.mark.parametrize(
    ("max_norm", "expected"), [(1.0, ([0.6, 0.0], [0.8])), (5.0, ([3.0, 0.0], [4.0])), (0.0, ([3.0, 0.0], [4.0]))]
)
def test_gradients_are_scaled_together_and_their_norm_before_is_returned(
    max_norm: float, expected: tuple[list[float], list[float]]
) -> None:
    weights = with_gradients([3.0, 0.0], None, [4.0])
    assert clip_gradients(weights, max_norm) == pytest.approx(5.0)
    assert weights[1].grad is None
    assert clip_gradients(with_gradients(None), 1.0) == 0.0
    for weight, values in zip((weights[0], weights[2]), expected, strict=True):
        torch.testing.assert_close(weight.grad, torch.tensor(values))


def test_the_norm_of_low_precision_gradients_is_added_up_in_float32() -> None:
    [weight] = [nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))]
    weight.grad = torch.full_like(weight, 0.01)
    element = float(torch.tensor(0.01, dtype=torch.bfloat16))
    # The nearest bfloat16 number is 2e-3 away.
    assert clip_gradients([weight], 0.0) == pytest.approx(element * math.sqrt(100_000), rel=1e-3)


def test_clipping_takes_as_many_kernels_for_many_weights_as_for_few() -> None:
    def num_calls(num_weights: int) -> int:
        weights = with_gradients(*([3.0 * i] for i in range(num_weights)))
        with _Calls() as calls:
            norm = clip_gradients(weights, 1.0)
        assert norm == pytest.approx(3.0 * math.sqrt(sum(i * i for i in range(num_weights))), rel=1e-6)
        return calls.number

    assert num_calls(40) == num_calls(4)


class _Calls(TorchDispatchMode):
    """Count the operations that torch dispatches."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_gradients_of_two_dtypes_are_scaled_by_one_norm() -> None:
    weights = [nn.Parameter(torch.zeros(1, dtype=dtype)) for dtype in (torch.float64, torch.bfloat16)]
    for weight, value in zip(weights, (3.0, 4.0), strict=True):
        weight.grad = torch.full_like(weight, value)
    assert clip_gradients(weights, 2.5) == 5.0
    assert [float(weight.grad) for weight in weights if weight.grad is not None] == [1.5, 2.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_are_refused_before_anything_is_scaled(bad: float) -> None:
    weights = with_gradients([3.0, 0.0], [bad])
    with pytest.raises(StateError, match=r"a step needs finite gradients, and their norm is (nan|inf); start a run"):
        clip_gradients(weights, 1.0)
    assert weights[0].grad is not None
    assert weights[0].grad.tolist() == [3.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate: expected greater than 0, got 0.0"),
        ({"warmup_steps": -1}, "warmup_steps: expected greater than or equal to 0, got -1"),
        ({"max_grad_norm": -0.5}, "max_grad_norm: expected greater than or equal to 0, got -0.5"),
        ({"schedule": "cosine"}, "num_steps=None"),
        ({"schedule": "cosine", "warmup_steps": 3, "num_steps": 3}, "must be below num_steps = 3, got 3"),
        (
            {"schedule": "cosine", "num_steps": 3, "min_learning_rate": 2.0},
            "must be at most learning_rate = 1.0, got 2.0",
        ),
    ],
)
def test_options_that_cannot_be_are_refused_with_their_value(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_optimizer(nn.Linear(2, 3), OptimOptions(**({"learning_rate": 1.0} | options)))  # type: ignore[arg-type]
