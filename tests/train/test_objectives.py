"""Objectives by hand: worked numbers and the errors that guard them."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import assert_gradients_equal, build_float64, flat_logprobs, take_gradients
from treering.errors import ConfigError, InputError
from treering.train.objectives import (
    Entries,
    Objective,
    cispo,
    clipped_surrogate,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    ppo,
    rloo,
    sft,
)
from treering.train.step import backward
from treering.tree.forest import Forest

MODEL = build_float64()
FOREST = Forest.from_sequences([[5, 6, 7], [5, 6, 8], [5]])


def surrogate(logprob: float, old: float, advantage: float, clip: tuple[float, float]) -> float:
    one = [torch.tensor([x], dtype=torch.float64) for x in (logprob, old, advantage)]
    return float(clipped_surrogate(*one, clip=clip).loss)


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
    terms = clipped_surrogate(logprobs, old, advantages, clip=(0.2, 0.2))
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
    terms = clipped_surrogate(logprobs, old, torch.ones(2), clip=(0.2, 0.2))
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


@pytest.mark.usefixtures("unchecked")
def test_policy_objectives_need_masks_and_a_sane_clip() -> None:
    with pytest.raises(InputError, match="grpo needs loss_masks: which tokens did the policy sample"):
        grpo([1.0], None)  # type: ignore[arg-type]
    for clip in ((1.5, 0.2), 0.2, None, (0.1,), ("a", "b"), (0.2, math.inf)):
        with pytest.raises(ConfigError, match=rf"clip must be \(low, high\).*got {re.escape(repr(clip))}"):
            dapo([1.0], [[0, 1]], clip=clip)  # type: ignore[arg-type]


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


def test_dr_grpo_divides_by_a_constant_where_one_is_given() -> None:
    weighting = dr_grpo([1.0], [[1]], divisor=9.0).weighting
    assert (weighting.normalizer, weighting.divisor) == ("constant", 9.0)
    with pytest.raises(ConfigError, match="divisor belongs to normalizer 'constant'"):
        dr_grpo([1.0], [[1]], normalizer="token_mean", divisor=9.0)


def test_terms_see_whole_sequences_only_where_they_must() -> None:
    old = [[0.0, -1.0]]
    for make in (grpo, dapo, dr_grpo, cispo, ppo):
        assert make([1.0], [[0, 1]], old).scope == "entry"
    for make in (gspo, rloo):
        assert (make([1.0], [[0, 1]]).scope, make([1.0], [[0, 1]], old).scope) == ("entry", "branch")
    for mode, scope in (("token_mask", "entry"), ("sequence_mask", "branch"), ("sequence_truncate", "branch")):
        assert grpo([1], [[0, 1]], old, behaviour_logprobs=old, max_importance=2.0, importance=mode).scope == scope  # type: ignore[arg-type]


def test_entropies_and_values_are_asked_for_only_where_they_are_read() -> None:
    assert grpo([1.0], [[1]]).needs == frozenset()
    assert gspo([1.0], [[1]], entropy_coefficient=0.0).needs == {"entropy"}
    assert ppo([1.0], [[1]]).needs == frozenset()
    assert ppo([1.0], [[1]], returns=[1.0], entropy_coefficient=0.1).needs == {"value", "entropy"}


@pytest.mark.parametrize("make", [gspo, rloo])
def test_once_is_refused_where_a_term_is_not_a_token_s_own(make: Callable[..., Objective]) -> None:
    with pytest.raises(
        ConfigError, match=f'{make.__name__} takes shared="sum" only here: its ratio is that of a whole'
    ):
        make([1.0], [[0, 1]], [[0, -1]], shared="once")
    behaviour = {"behaviour_logprobs": [[0, -1]], "max_importance": 2.0, "importance": "sequence_mask"}
    with pytest.raises(ConfigError, match='cispo takes shared="sum" only here'):
        cispo([1.0], [[0, 1]], shared="once", **behaviour)  # type: ignore[arg-type]


def test_gspo_refuses_once_on_policy_too_and_rloo_does_not() -> None:
    with pytest.raises(ConfigError, match='gspo takes shared="sum" only'):
        gspo([1.0], [[0, 1]], shared="once")
    assert rloo([1.0], [[0, 1]], shared="once").scope == "entry"


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


MASKS = [[0, 1, 1], [0, 0, 1], [0]]
OLD = [[0.0, -2.0, -3.5], [0.0, math.nan, -2.5], [0.0]]
BEHAVIOUR = [[math.nan, -3.0, -3.2], [0.0, math.nan, -6.0], [math.nan]]
ADVANTAGES = [2.0, -1.0, 1.0]


@pytest.mark.parametrize("make", [grpo, dapo])
@pytest.mark.parametrize("with_old", [True, False])
def test_each_term_is_weighted_by_its_truncated_importance(make: Callable[..., Objective], with_old: bool) -> None:
    cap = 1.5
    result = backward(
        MODEL,
        FOREST,
        make(
            ADVANTAGES,
            MASKS,
            OLD if with_old else None,
            behaviour_logprobs=BEHAVIOUR,
            max_importance=cap,
            normalizer="sum",
        ),
    )
    actual = take_gradients(MODEL)
    weights, terms = [], []
    for branch, sequence in enumerate([[5, 6, 7], [5, 6, 8]]):
        logprobs = flat_logprobs(MODEL, sequence)[0]
        for t in (t for t in range(1, 3) if MASKS[branch][t]):
            target = OLD[branch][t] if with_old else logprobs[t - 1].item()
            weights.append(min(math.exp(target - BEHAVIOUR[branch][t]), cap))
            ratio = torch.exp(logprobs[t - 1] - target)
            clipped = ratio.clamp(0.8, 1.2 if make is grpo else 1.28)
            terms.append(-weights[-1] * torch.min(ratio * ADVANTAGES[branch], clipped * ADVANTAGES[branch]))
    loss = torch.stack(terms).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert result.loss == pytest.approx(loss.item(), rel=1e-12)
    assert result.metrics["importance"] == pytest.approx(sum(weights) / 3, rel=1e-12)
    assert_gradients_equal(actual, take_gradients(MODEL), 1e-10)


def test_without_a_cap_nothing_is_weighted() -> None:
    assert "importance" not in backward(MODEL, FOREST, grpo(ADVANTAGES, MASKS, OLD)).metrics
    MODEL.zero_grad(set_to_none=True)


def test_sampling_from_the_trained_distribution_is_no_correction() -> None:
    plain = backward(MODEL, FOREST, grpo(ADVANTAGES, MASKS, OLD))
    expected = take_gradients(MODEL)
    same = backward(MODEL, FOREST, grpo(ADVANTAGES, MASKS, OLD, behaviour_logprobs=OLD, max_importance=2.0))
    assert (same.loss, same.metrics["importance"]) == (plain.loss, 1.0)
    assert_gradients_equal(take_gradients(MODEL), expected, 0.0)
