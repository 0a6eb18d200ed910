"""Positions: what a model was never trained on is refused, and a model without a limit reads everything."""

import pytest
import torch

from tests.models import build
from treering.errors import InputError
from treering.model.positions import check_positions, max_positions


def test_the_limit_is_that_of_the_configuration_inside_any_wrapper() -> None:
    model = build(max_position_embeddings=32)
    assert max_positions(model) == max_positions(torch.compile(model, backend="eager")) == 32
    for missing in (None, 0):
        vars(model.config)["max_position_embeddings"] = missing
        assert max_positions(model) is None
    assert max_positions(torch.nn.Linear(2, 2)) is None


def test_the_last_position_is_allowed_and_the_next_one_is_not() -> None:
    check_positions(32, 32, what="this", fix="cut it")
    check_positions(10**9, None, what="this", fix="cut it")
    with pytest.raises(InputError, match="the model reads 32 positions, and this goes beyond; cut it"):
        check_positions(33, 32, what="this", fix="cut it")
