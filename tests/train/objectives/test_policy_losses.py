"""Policy losses by hand: defaults, scopes, and the ratios of tokens and sequences."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from treering.train.objectives import Entries, Objective, cispo, dapo, dr_grpo, grpo, gspo, ppo, rloo, sft


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
