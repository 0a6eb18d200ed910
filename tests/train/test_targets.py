"""Targets are scored and trained as in a flat forward of each sequence run separately."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import VOCAB, assert_gradients_equal, build_float64, take_gradients
from treering.errors import InputError, StateError
from treering.train.targets import score_targets

PROMPT = [3, 5, 7, 2, 9, 4]
SEQUENCES = [[*PROMPT, 1, 2, 3], [*PROMPT, 1, 6], [*PROMPT, 1, 2, 3], [8, 8, 8], [*PROMPT]]


def targets_of(sequences: list[list[int]]) -> list[np.ndarray]:
    """Return the next tokens, those of another sequence, or several for each state."""
    random = np.random.default_rng(0)
    found = [np.array([*sequence[1:], 0]) for sequence in sequences]
    found[1] = random.integers(0, VOCAB, len(sequences[1]))
    found[3] = random.integers(0, VOCAB, (len(sequences[3]), 4))
    found[4] = random.integers(0, 3, (len(sequences[4]), 2))
    return found


WEIGHTS = [torch.linspace(-1, 2, each.size, dtype=torch.float64).reshape(each.shape) for each in targets_of(SEQUENCES)]


def squared(number: int, logprobs: Tensor) -> Tensor:
    """Compute a loss that is neither linear nor a sum over tokens, so that it needs the whole sequence."""
    return ((logprobs * WEIGHTS[number].to(logprobs)).sum() / 10) ** 2 + logprobs.sum() / (number + 1)


def flat(model: torch.nn.Module, sequence: list[int], targets: np.ndarray) -> Tensor:
    logprobs = model(torch.tensor([sequence])).logits[0].log_softmax(-1)
    wide = torch.from_numpy(targets.reshape(len(sequence), -1))
    return logprobs.gather(-1, wide).reshape(targets.shape)


@pytest.mark.parametrize("max_tokens", [None, 4, 2])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_log_probs_and_gradients_of_any_targets_are_those_of_flat_sequences(
    family: str, max_tokens: int | None
) -> None:
    model, targets = build_float64(family).eval(), targets_of(SEQUENCES)
    expected = [flat(model, *pair) for pair in zip(SEQUENCES, targets, strict=True)]
    losses = [squared(*pair) for pair in enumerate(expected)]
    torch.stack(losses).sum().backward()
    gradients = take_gradients(model)
    found = score_targets(model, SEQUENCES, targets, loss=squared, max_tokens=max_tokens)
    assert_gradients_equal(take_gradients(model), gradients, 1e-10)
    for one, other in zip(found.logprobs, expected, strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), atol=1e-11)
    np.testing.assert_allclose(found.losses, torch.stack(losses).detach().numpy(), atol=1e-10)
    assert found.num_flat_tokens == sum(map(len, SEQUENCES))
    assert max_tokens is not None or found.num_computed_tokens == 6 + 3 + 1 + 3
    alone = score_targets(model, SEQUENCES, targets, max_tokens=max_tokens)
    assert all(weight.grad is None for weight in model.parameters())
    for one, other in zip(alone.logprobs, found.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


@pytest.mark.parametrize(
    ("targets", "words"),
    [([[6, 7, 8]], r"\[2\] or \[2, k\]"), ([[6, VOCAB]], "below"), ([[-1, 2]], "below"), ([], "every sequence")],
)
def test_targets_that_do_not_fit_are_refused(targets: list[list[int]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        score_targets(build_float64(), [[5, 6]], [np.array(each) for each in targets])


def test_a_nan_loss_is_an_error() -> None:
    with pytest.raises(StateError, match="sequence 0 is nan"):
        score_targets(build_float64(), [[5, 6]], [np.array([6, 7])], loss=lambda _, logprobs: logprobs.sum() * np.nan)
