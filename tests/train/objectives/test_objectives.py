"""Objectives by hand: worked numbers, defaults, ratios, options, and mismatched values."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import assert_gradients_equal, build_float64, take_gradients
from treering.errors import InputError
from treering.objectives import (
    Entries,
    Objective,
    Terms,
    cispo,
    dapo,
    dpo,
    dr_grpo,
    grpo,
    gspo,
    policy_objective,
    ppo,
    rloo,
    sft,
)
from treering.train.entries import read_entries
from treering.train.objective import Weighting
from treering.train.policy_loss import Importance, estimate_kl, surrogate_of_ratio
from treering.train.step import backward
from treering.tree.forest import Forest

MODEL = build_float64()
FOREST = Forest.from_sequences([[5, 6, 7], [5, 6, 8], [5]])
MASKS = [[0, 1, 1], [0, 0, 1], [0]]
OLD = [[0.0, -2.0, -3.5], [0.0, math.nan, -2.5], [0.0]]
REF = [[math.nan, -3.0, -3.2], [0.0, math.nan, -6.0], [math.nan]]
ADVANTAGES = [2.0, -1.0, 1.0]


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
    # KL(old, new) is estimated by r - 1 - log r.
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
            "loss mask 0 must be a number or a flat list of numbers, got a ragged list",
        ),  # type: ignore[list-item]
        (lambda: grpo(["a", 1, 1], [[0, 1, 1]] * 2 + [[0]]), r"advantages\[0\] must be a number or a flat list"),  # type: ignore[list-item]
        (lambda: grpo([1, 1j, 1], [[0, 1, 1]] * 2 + [[0]]), r"advantages\[1\] must be a number.*complex"),  # type: ignore[list-item]
        (lambda: grpo(1.0, [[0, 1, 1]] * 2 + [[0]]), "advantages must be a list with one item per branch, got float"),  # type: ignore[arg-type]
        (
            lambda: grpo([1, 1, 1], [[0, 1, 1]] * 2 + [[0]], [[0, -1, math.inf], [0, -1, -1], [0]]),
            r"old_logprobs\[0\] must be finite where a token is trained, got inf at token 2",
        ),
        (
            lambda: grpo([1, 1, 1], [[0, 1, 1]] * 2 + [[0]], [[0, 0.1, 0.9], [0, 0.5, 0.7], [0]]),
            r"old_logprobs\[0\] must be log-probabilities, so at most 0, where a token is trained, got 0\.9 at token 2",
        ),
    ],
)
def test_values_that_do_not_fit_the_branches_are_refused(objective: Callable[[], Objective], message: str) -> None:
    with pytest.raises(InputError, match=message):
        backward(MODEL, FOREST, objective())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda entries: Terms(loss=entries.logprobs.mean(), metrics={}), r"number for each of its 4 .*got shape \(\)"),
        (lambda entries: entries.logprobs, r"must return objectives\.Terms\(.*got Tensor"),
        (lambda entries: Terms(loss=entries.logprobs.detach(), metrics={}), "has no gradient; compute it from"),
    ],
)
def test_a_loss_of_your_own_that_would_train_something_else_is_refused(
    loss: Callable[[Entries], Any], message: str
) -> None:
    own = policy_objective(
        "own",
        lambda entries, *_: loss(entries),
        {},
        advantages=[1, 1, 1],
        loss_masks=[[0, 1, 1]] * 2 + [[0]],
        old_logprobs=None,
        weighting=Weighting(normalizer="token_mean"),
    )
    with pytest.raises(InputError, match=message):
        backward(MODEL, FOREST, own)


def test_a_detached_loss_is_refused_in_an_objective_made_by_hand() -> None:
    own = replace(
        sft([[0, 1, 1]] * 2 + [[0]]), terms=lambda entries: Terms(loss=-entries.logprobs.detach(), metrics={})
    )
    with pytest.raises(InputError, match="the loss of 'sft' has no gradient; compute it from"):
        backward(MODEL, FOREST, own)


def test_a_loss_of_tokens_is_refused_in_an_objective_of_pairs() -> None:
    pairs = dpo([(0, 1)], [[0, 1, 1]] * 2 + [[0]])
    with pytest.raises(InputError, match=r"'dpo' must have one number for each of its 1 .*got shape \(4,\)"):
        backward(MODEL, FOREST, replace(pairs, terms=lambda entries: Terms(loss=entries.logprobs, metrics={})))


def entries_of(
    logprobs: list[float],
    branch: list[int],
    *,
    num_branches: int,
    advantages: list[float],
    old: list[float] | None = None,
) -> Entries:
    values = {"advantages": advantages} if old is None else {"advantages": advantages, "old_logprobs": old}
    return Entries(
        logprobs=torch.tensor(logprobs, dtype=torch.float64),
        values={name: torch.tensor(items, dtype=torch.float64) for name, items in values.items()},
        branch=torch.tensor(branch),
        num_branches=num_branches,
    )


def loss_of(objective: Objective, logprobs: list[float], **more: Any) -> list[float]:
    return objective.terms(entries_of(logprobs, **more)).loss.tolist()


def test_defaults_are_those_of_the_papers() -> None:
    makers = (grpo, dapo, dr_grpo, gspo, cispo, rloo, ppo)
    objectives = [make([1.0], [[1]]) for make in makers]
    assert [objective.name for objective in objectives] == [make.__name__ for make in makers]
    assert [objective.weighting.normalizer for objective in objectives] == [
        "sequence_mean",
        "token_mean",
        "sequence_sum",
        "sequence_mean",
        "token_mean",
        "sequence_sum",
        "token_mean",
    ]
    assert all(objective.weighting.shared == "sum" for objective in [sft(), *objectives])


def test_terms_see_whole_sequences_only_where_they_must() -> None:
    old = [[0.0, -1.0]]
    for make in (grpo, dapo, dr_grpo, cispo, ppo):
        assert make([1.0], [[0, 1]], old).scope == "entry"
    for make in (gspo, rloo):
        assert (make([1.0], [[0, 1]]).scope, make([1.0], [[0, 1]], old).scope) == ("entry", "branch")
    for mode, scope in (("token_mask", "entry"), ("sequence_mask", "branch"), ("sequence_truncate", "branch")):
        assert grpo([1], [[0, 1]], old, behaviour_logprobs=old, max_importance=2.0, importance=mode).scope == scope  # type: ignore[arg-type]


def test_a_ratio_of_a_sequence_has_its_value_at_every_token() -> None:
    entries = entries_of(
        [-1.0, -2.0, -3.0], [0, 0, 2], num_branches=3, advantages=[2.0, 2.0, -1.0], old=[-1.0, -2.2, -2.5]
    )
    (mean, summed) = (
        make([0] * 3, [[1]] * 3, [[0]] * 3).terms(entries).metrics["ratio"].tolist() for make in (gspo, rloo)
    )
    assert mean == pytest.approx([math.exp(0.1), math.exp(0.1), math.exp(-0.5)])
    assert summed == pytest.approx([math.exp(0.2), math.exp(0.2), math.exp(-0.5)])


def test_the_worked_examples_of_the_docstrings() -> None:
    one = {"branch": [0], "num_branches": 1}
    assert loss_of(cispo([2], [[1]], [[0]]), [-1.0], advantages=[2], old=[-3.0], **one) == pytest.approx([10.0])
    pair = {"branch": [0, 0], "num_branches": 1, "advantages": [2, 2]}
    assert loss_of(gspo([2], [[1]], [[0]]), [-1.0, -1.0], old=[-1.0, -1.2], **pair) == pytest.approx([-2.0008] * 2)
    assert sum(loss_of(rloo([2], [[1]]), [-1.0, -2.0], **pair)) == pytest.approx(6.0)
    unclipped = rloo([2], [[1]], [[0]])
    assert sum(loss_of(unclipped, [-1.0, -2.0], old=[-1.1, -2.0], **pair)) == pytest.approx(-2.2103, abs=1e-4)


def test_cispo_s_metrics_count_the_weights_that_it_bounds() -> None:
    entries = entries_of([-1.0] * 3, [0] * 3, num_branches=1, advantages=[1.0, -1.0, 1.0], old=[-3.0, -1.0, -0.1])
    terms = cispo([1.0], [[1]], [[0]], (0.2, 0.2)).terms(entries)
    assert terms.metrics["clip_high"].tolist() == [1, 0, 0]
    assert terms.metrics["clip_low"].tolist() == [0, 0, 1]
    assert terms.metrics["ratio"].tolist() == pytest.approx([math.exp(2), 1, math.exp(-0.9)])


@pytest.mark.parametrize("make", [gspo, rloo, cispo])
def test_extreme_ratios_of_sequences_leave_gradients_finite(make: Callable[..., Objective]) -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    values = {"advantages": torch.tensor([1.0, 0.0, -1.0]), "old_logprobs": torch.tensor([-1e30, -300.0, -200.0])}
    entries = Entries(logprobs=logprobs, values=values, branch=torch.tensor([0, 1, 2]), num_branches=3)
    loss = make([0] * 3, [[1]] * 3, [[0]] * 3).terms(entries).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert bool(loss.isfinite().all())
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("make", [grpo, gspo])
def test_options_that_are_none_change_nothing(make: Callable[..., Objective]) -> None:
    names = ("behaviour_logprobs", "max_importance", "importance", "ref_logprobs", "kl_coefficient", "kl_estimator")
    plain = backward(MODEL, FOREST, make(ADVANTAGES, MASKS, OLD))
    expected = take_gradients(MODEL)
    same = backward(MODEL, FOREST, make(ADVANTAGES, MASKS, OLD, **dict.fromkeys(names), entropy_coefficient=None))
    assert (same.loss, same.averages) == (plain.loss, plain.averages)
    assert_gradients_equal(take_gradients(MODEL), expected, 0.0)


@pytest.mark.parametrize("make", [grpo, gspo])
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


@pytest.mark.parametrize(
    ("target", "behaviour", "cap", "expected"),
    [
        (-1.0, -3.0, 2.0, 2.0),
        (-1.0, -1e30, 3.0, 3.0),
        (-1e30, -1.0, 3.0, math.exp(-20.0)),
    ],
)
def test_a_ratio_above_the_cap_becomes_the_cap_and_is_a_constant(
    target: float, behaviour: float, cap: float, expected: float
) -> None:
    log_probs = [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (target, behaviour)]
    weights = Importance(max_importance=cap).weights(*log_probs, branch=torch.tensor([0]), num_branches=1)
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([expected], rel=1e-12)


def test_an_extreme_reference_leaves_the_estimate_finite() -> None:
    logprobs = torch.tensor([-1e4, -1.0], requires_grad=True)
    kl = estimate_kl(logprobs, torch.tensor([-1.0, -1e4]), estimator="k3")
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    assert bool(kl.isfinite().all() and gradient.isfinite().all())


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
        read_entries([Forest.from_sequences([[1, 2, 3], [4, 5, 6]])], objective)
