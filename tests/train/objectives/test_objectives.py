"""Objectives by hand: worked numbers and errors."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.models import build_float64
from treering.errors import InputError
from treering.train.gradient.backward import backward
from treering.train.objectives import Objective, grpo, sft
from treering.train.objectives.policy import surrogate_of_ratio
from treering.tree.forest import Forest

MODEL = build_float64()
FOREST = Forest.from_sequences([[5, 6, 7], [5, 6, 8], [5]])


def test_the_clipped_surrogate_by_hand() -> None:
    log_ratio, advantages = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.0]), torch.tensor([2.0, -2.0, 2.0, -2.0, 3.0])
    expected = [-2.56, 2.0 * math.exp(0.5), -2.0 * math.exp(-0.5), 1.6, -3.0]
    assert surrogate_of_ratio(log_ratio, advantages, clip=(0.2, 0.28)).loss.tolist() == pytest.approx(expected)


def test_clip_metrics_count_entries_whose_gradient_is_cut() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.5, -1.5], requires_grad=True)
    old = torch.tensor([-1.5, -1.5, -1.0, -1.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    terms = surrogate_of_ratio(logprobs - old, advantages, clip=(0.2, 0.2))
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logprobs)
    cut = (terms.metrics["clip_low"] + terms.metrics["clip_high"]).bool()
    assert torch.equal(cut, gradient == 0)
    assert terms.metrics["clip_high"].tolist() == [1, 0, 0, 0]
    assert terms.metrics["clip_low"].tolist() == [0, 0, 0, 1]
    # An estimate of KL(old, new): r - 1 - log r.
    up, down = math.exp(0.5), math.exp(-0.5)
    assert terms.metrics["ratio"].tolist() == pytest.approx([up, up, down, down])
    assert terms.metrics["approx_kl"].tolist() == pytest.approx([up - 1.5, up - 1.5, down - 0.5, down - 0.5])


def test_per_branch_values_may_be_lists_arrays_or_tensors() -> None:
    masks = [[0, 1, 1], [0, 1, 0], [0]]
    forms: list[Objective] = [
        grpo([1.0, -2, 0.5], masks),
        grpo(np.array([1.0, -2.0, 0.5]), [np.array(mask) for mask in masks]),
        grpo(torch.tensor([1.0, -2.0, 0.5]), [torch.tensor(mask).bool() for mask in masks]),
        grpo([[9.0, 1.0, 1.0], torch.tensor([9.0, -2.0, -2.0], dtype=torch.bfloat16), 0.5], masks),
    ]
    losses = [backward(MODEL, FOREST, objective).loss for objective in forms]
    MODEL.zero_grad(set_to_none=True)
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-12)
    assert losses[0] != 0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (lambda: sft([[0, 1, 1]]), "loss_masks needs one item per branch.*got 1 for 3 branches"),
        (lambda: sft([[0, 1, 1], [0, 1], [0]]), r"loss mask 1 needs one entry per token \(3\), got shape \(2,\)"),
        (lambda: sft([[0, 1, 2], [0, 1, 1], [0]]), "loss mask 0 must hold 0 and 1 only, got 2"),
        (lambda: grpo([1, 2], [[0, 1, 1]] * 2 + [[0]]), "advantages needs one item per branch.*got 2 for 3"),
        (
            lambda: grpo([1, [1, 2], 3], [[0, 1, 1]] * 2 + [[0]]),
            r"advantages\[1\] needs one number, or one per token \(3\)",
        ),
        (
            lambda: grpo([1, math.nan, 3], [[0, 1, 1]] * 2 + [[0]]),
            r"advantages\[1\] must be finite where a token is trained, got nan at token 1",
        ),
        (lambda: sft(iter([[0, 1, 1]])), "loss_masks must be a list with one item per branch, got list_iterator"),  # type: ignore[arg-type]
        (
            lambda: sft([[0, [1], 1], [0, 1, 1], [0]]),
            "loss mask 0 must be a number or a flat list of numbers; it is ragged",
        ),  # type: ignore[list-item]
        (lambda: grpo(["a", 1, 1], [[0, 1, 1]] * 2 + [[0]]), r"advantages\[0\] must be a number or a flat list"),  # type: ignore[list-item]
        (lambda: grpo([1, 1j, 1], [[0, 1, 1]] * 2 + [[0]]), r"advantages\[1\] must be a number.*complex"),  # type: ignore[list-item]
        (lambda: grpo(1.0, [[0, 1, 1]] * 2 + [[0]]), "advantages must be a list with one item per branch, got float"),  # type: ignore[arg-type]
        (
            lambda: grpo([1, 1, 1], [[0, 1, 1]] * 2 + [[0]], [[0, -1, math.inf], [0, -1, -1], [0]]),
            r"old_logprobs\[0\] must be finite where a token is trained, got inf at token 2",
        ),
    ],
)
def test_values_that_do_not_fit_the_branches_are_refused(objective: Callable[[], Objective], message: str) -> None:
    with pytest.raises(InputError, match=message):
        backward(MODEL, FOREST, objective())
