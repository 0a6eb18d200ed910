"""Options of policy objectives: importance weights, penalties, and what leaves a loss as it is."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import assert_gradients_equal, build_float64, take_gradients
from treering.errors import InputError
from treering.train.gradient.backward import backward
from treering.train.objectives import Objective, cispo, grpo, gspo
from treering.train.objectives.importance import Importance
from treering.train.objectives.regularizers import KlEstimator, estimate_kl
from treering.tree.forest import Forest

MODEL = build_float64()
FOREST = Forest.from_sequences([[5, 6, 7], [5, 6, 8], [5]])
MASKS = [[0, 1, 1], [0, 0, 1], [0]]
OLD = [[0.0, -2.0, -3.5], [0.0, math.nan, -2.5], [0.0]]
REF = [[math.nan, -3.0, -3.2], [0.0, math.nan, -6.0], [math.nan]]
ADVANTAGES = [2.0, -1.0, 1.0]
MAKERS = [grpo, gspo]


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


def expected_values(estimator: KlEstimator) -> tuple[float, Tensor]:
    """The mean estimate over a small vocabulary and its mean gradient, tokens drawn from the policy itself."""
    torch.manual_seed(0)
    scores = torch.randn(6, dtype=torch.float64, requires_grad=True)
    policy, reference = scores.log_softmax(0), torch.randn(6, dtype=torch.float64).log_softmax(0)
    chance = policy.detach().exp()
    estimates = estimate_kl(policy, reference, estimator=estimator)
    (gradient,) = torch.autograd.grad((chance * estimates).sum(), scores)
    return float((chance * estimates).sum().detach()), gradient


def divergences() -> tuple[float, Tensor, Tensor]:
    """KL(policy, reference), its gradient, and that of KL(reference, policy)."""
    torch.manual_seed(0)
    scores = torch.randn(6, dtype=torch.float64, requires_grad=True)
    policy, reference = scores.log_softmax(0), torch.randn(6, dtype=torch.float64).log_softmax(0)
    forward, backward = (policy.exp() * (policy - reference)).sum(), (reference.exp() * (reference - policy)).sum()
    gradients = [torch.autograd.grad(kl, scores, retain_graph=True)[0] for kl in (forward, backward)]
    return forward.item(), gradients[0], gradients[1]


def test_k1_and_k3_are_unbiased_and_k2_and_k3_have_the_gradients_that_are_said() -> None:
    value, gradient, reverse_gradient = divergences()
    assert expected_values("k1")[0] == pytest.approx(value)
    assert expected_values("k3")[0] == pytest.approx(value)
    assert expected_values("k2")[0] != pytest.approx(value, rel=0.01)
    torch.testing.assert_close(expected_values("k1")[1], torch.zeros_like(gradient))
    torch.testing.assert_close(expected_values("k2")[1], gradient)
    torch.testing.assert_close(expected_values("k3")[1], reverse_gradient)


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
        objective.flat_values(np.array([3, 3]), trained=np.ones(6, bool))
