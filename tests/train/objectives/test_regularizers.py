"""KL estimators by hand and on average, value losses by hand, and the errors of their options."""

import math

import pytest
import torch
from torch import Tensor

from treering.errors import ConfigError
from treering.train.objectives.ppo import ValueLoss, make_value_loss
from treering.train.objectives.regularizers import KlEstimator, estimate_kl, make_regularizers


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
def test_estimators_by_hand(estimator: KlEstimator, expected: float) -> None:
    assert estimate_kl(numbers(-1.0), numbers(-1.5), estimator=estimator).tolist() == pytest.approx([expected])


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


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ref_logprobs": [[0]]}, "got no kl_coefficient; give both, or none of"),
        ({"kl_coefficient": 0.1}, "got no ref_logprobs"),
        ({"kl_estimator": "k3"}, "got no ref_logprobs and no kl_coefficient"),
        (
            {"ref_logprobs": [[0]], "kl_coefficient": -0.1},
            r"kl_coefficient is a finite number of at least 0, got -0\.1",
        ),
        ({"ref_logprobs": [[0]], "kl_coefficient": 0.1, "kl_estimator": "k4"}, "one of k1, k2, k3, got 'k4'"),
        ({"entropy_coefficient": math.inf}, "entropy_coefficient is a finite number of at least 0, got inf"),
        ({"entropy_coefficient": "a"}, "entropy_coefficient is a finite number of at least 0, got 'a'"),
    ],
)
def test_half_given_and_impossible_options_are_refused(options: dict[str, object], message: str) -> None:
    nothing = {"ref_logprobs": None, "kl_coefficient": None, "kl_estimator": None, "entropy_coefficient": None}
    with pytest.raises(ConfigError, match=message):
        make_regularizers(**{**nothing, **options})  # type: ignore[arg-type]


def test_value_losses_by_hand() -> None:
    values, returns, old = numbers(2.0, 2.0), numbers(3.0, 1.0), numbers(1.0, 1.0)
    assert ValueLoss().of(values, returns=returns, old_values=None).tolist() == [0.5, 0.5]
    clipped = ValueLoss(clip=0.5).of(values, returns=returns, old_values=old)
    assert clipped.tolist() == [1.125, 0.5]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coefficient": 0.5}, "value_coefficient belong to a value loss, which needs returns"),
        ({"old_values": [[0]], "clip": 0.2}, "old_values and value_clip belong to a value loss"),
        ({"returns": [0], "clip": 0.2}, "needs old_values and value_clip, got no old_values"),
        ({"returns": [0], "old_values": [[0]]}, "got no value_clip"),
        ({"returns": [0], "old_values": [[0]], "clip": 0.0}, r"value_clip is a positive number, got 0\.0"),
        ({"returns": [0], "coefficient": -1.0}, r"value_coefficient is a finite number of at least 0, got -1\.0"),
    ],
)
def test_half_given_value_losses_are_refused(options: dict[str, object], message: str) -> None:
    nothing = {"returns": None, "coefficient": None, "old_values": None, "clip": None}
    with pytest.raises(ConfigError, match=message):
        make_value_loss(**{**nothing, **options})  # type: ignore[arg-type]
