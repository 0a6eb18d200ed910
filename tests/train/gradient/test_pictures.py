"""Law 2 with pictures: gradients of text, projector and vision tower equal those of stock transformers, run flat."""

import pytest
from torch import nn

from tests.models import take_gradients
from tests.picture_models import FAMILIES, Sequenced, build, flat_loss, forest_of, picture, sequence
from treering.objectives import sft
from treering.train.gradient.backward import backward


def sequences_of(family: str) -> list[Sequenced]:
    """Branches before, between and after pictures; two sizes in one prefix; equal placeholders with other pixels."""
    first, second, other = (picture(family, i, wide=i == 1) for i in range(3))
    start = (5, 6, 92, first, 93)
    both = (*start, 7, 92, second, 93, 8)
    return [
        sequence(*both, trained=[10, 11, 12]),
        sequence(*both, trained=[10, 11, 13, 14]),
        sequence(*both, trained=[15]),
        sequence(*start, 7, 92, other, 93, 8, trained=[10, 16]),
        sequence(*start, 17, trained=[18, 19, 20]),
        sequence(*start, 7, 92, first, 93, trained=[21, 22]),
        sequence(5, 6, 23, trained=[24, 25]),
        sequence(5, 6, 92, other, 93, 7, 92, second, 93, 8, trained=[10, 11]),
    ]


def assert_equal(model: nn.Module, sequences: list[Sequenced], **options: object) -> None:
    """Gradients of the step equal those of flat training within 1e-6 of the largest, and so does the loss."""
    expected_loss = flat_loss(model, sequences)
    expected_loss.backward()
    expected = take_gradients(model)
    masks = [one.mask for one in sequences]
    result = backward(model, forest_of(sequences), sft(masks, normalizer="sum"), **options)
    actual = take_gradients(model)
    assert result.loss == pytest.approx(float(expected_loss), rel=1e-6)
    largest = max(float(grad.abs().max()) for grad in expected.values())
    errors = {name: float((actual[name] - grad).abs().max()) / largest for name, grad in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 1e-6, f"{worst}: {errors[worst]:.1e} of the largest gradient"


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_flat_sequences(family: str) -> None:
    assert_equal(build(family), sequences_of(family))
