"""Objectives by hand: worked numbers and errors."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.models import assert_gradients_equal, build_float64, take_gradients
from treering.errors import InputError
from treering.train.gradient.backward import backward
from treering.train.objectives import Objective, grpo, sft, surrogate_of_ratio
from treering.tree.forest import Forest

MODEL = build_float64()
FOREST = Forest.from_sequences([[5, 6, 7], [5, 6, 8], [5]])


def surrogate(logprob: float, old: float, advantage: float, clip: tuple[float, float]) -> float:
    one = [torch.tensor([x], dtype=torch.float64) for x in (logprob, old, advantage)]
    return float(surrogate_of_ratio(one[0] - one[1], one[2], clip=clip).loss)


@pytest.mark.parametrize(
    ("logprob", "old", "advantage", "clip", "expected"),
    [
        (-1.0, -1.5, 2.0, (0.2, 0.2), -2.4),
        (-1.0, -1.5, 2.0, (0.2, 0.28), -2.56),
        (-1.0, -1.5, -2.0, (0.2, 0.2), 2.0 * math.exp(0.5)),
        (-1.5, -1.0, 2.0, (0.2, 0.2), -2.0 * math.exp(-0.5)),
        (-1.5, -1.0, -2.0, (0.2, 0.2), 1.6),
        (-1.0, -1.0, 3.0, (0.2, 0.2), -3.0),
    ],
)
def test_the_clipped_surrogate_by_hand(
    logprob: float, old: float, advantage: float, clip: tuple[float, float], expected: float
) -> None:
    assert surrogate(logprob, old, advantage, clip) == pytest.approx(expected)


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


def test_the_first_entry_of_a_sequence_is_ignored() -> None:
    old = [[math.nan, -1.0, -1.0], [math.inf, -1.0, -1.0], [math.nan]]
    loss = backward(MODEL, FOREST, grpo([1, 1, 1], [[1, 1, 1], [0, 1, 1], [1]], old)).loss
    same = backward(MODEL, FOREST, grpo([1, 1, 1], [[0, 1, 1], [1, 1, 1], [0]], [[0, -1, -1], [7, -1, -1], [0]])).loss
    MODEL.zero_grad(set_to_none=True)
    assert loss == same


def test_untrained_values_may_be_anything() -> None:
    masks = [[0, 0, 1], [0, 1, 0], [0]]
    loss = backward(MODEL, FOREST, grpo([1, 1, 1], masks, [[0, math.nan, -2], [0, -2, math.inf], [math.nan]])).loss
    same = backward(MODEL, FOREST, grpo([1, 1, 1], masks, [[0, -1, -2], [0, -2, -9], [0]])).loss
    MODEL.zero_grad(set_to_none=True)
    assert loss == same


def test_approx_kl_estimates_the_divergence_from_the_old_policy() -> None:
    logprobs, old = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    terms = surrogate_of_ratio(logprobs - old, torch.ones(2), clip=(0.2, 0.2))
    expected = [math.exp(0.5) - 1 - 0.5, math.exp(-1.0) - 1 + 1.0]
    assert terms.metrics["approx_kl"].tolist() == pytest.approx(expected)
    assert terms.metrics["ratio"].tolist() == pytest.approx([math.exp(0.5), math.exp(-1.0)])


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


MASKS = [[0, 1, 1], [0, 0, 1], [0]]
OLD = [[0.0, -2.0, -3.5], [0.0, math.nan, -2.5], [0.0]]
ADVANTAGES = [2.0, -1.0, 1.0]


def test_sampling_from_the_trained_distribution_is_no_correction() -> None:
    plain = backward(MODEL, FOREST, grpo(ADVANTAGES, MASKS, OLD))
    expected = take_gradients(MODEL)
    same = backward(MODEL, FOREST, grpo(ADVANTAGES, MASKS, OLD, behaviour_logprobs=OLD, max_importance=2.0))
    assert (same.loss, same.metrics["importance"]) == (plain.loss, 1.0)
    assert_gradients_equal(take_gradients(MODEL), expected, 0.0)
