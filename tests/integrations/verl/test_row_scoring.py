"""Rows in verl's layout: each row's values equal those of the row run separately, at its own temperature."""

import pytest
import torch
from torch.nn import functional as F

from tests.models import VOCAB, build, build_float64, flat_logprobs
from treering.errors import InputError
from treering.integrations.verl.row_scoring import score_rows_once
from treering.tree.forest import Forest

ROWS = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3, 4], [7, 8], [1, 2, 3, 4, 9]]
TEMPERATURES = [1.0, 0.5, 2.0, 1.0, 0.5]


def alone(model: torch.nn.Module, row: list[int], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs, entropy = (F.pad(values, (0, 1)) for values in flat_logprobs(model, row, temperature))
    return logprobs, entropy


def test_each_row_is_scored_as_alone_at_its_own_temperature() -> None:
    model = build_float64("qwen3")
    scores = score_rows_once(model, Forest.from_sequences(ROWS), TEMPERATURES)
    expected = [alone(model, row, temperature) for row, temperature in zip(ROWS, TEMPERATURES, strict=True)]
    torch.testing.assert_close(scores.logprobs, torch.cat([one for one, _ in expected]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(scores.entropy, torch.cat([one for _, one in expected]), rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_rows_trained_separately() -> None:
    model = build_float64("qwen3")
    weights = torch.randn(2, sum(map(len, ROWS)), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = score_rows_once(model, Forest.from_sequences(ROWS), TEMPERATURES)
    wanted = [*model.parameters()]
    ours = torch.autograd.grad((weights[0] * scores.logprobs + weights[1] * scores.entropy).sum(), wanted)
    parts = [alone(model, row, temperature) for row, temperature in zip(ROWS, TEMPERATURES, strict=True)]
    logprobs, entropy = (torch.cat([part[i] for part in parts]) for i in range(2))
    flat = torch.autograd.grad((weights[0] * logprobs + weights[1] * entropy).sum(), wanted)
    for grad, expected in zip(ours, flat, strict=True):
        assert (grad - expected).norm() <= 1e-9 * expected.norm() + 1e-12


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(InputError, match=r"temperature must be a positive number, got 0\.0"):
        score_rows_once(build("qwen3"), Forest.from_sequences([[1, VOCAB - 1]]), [0.0])
