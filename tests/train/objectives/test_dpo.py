"""DPO's losses, metrics and errors by hand."""

import math

import numpy as np
import pytest
import torch

from tests.models import build_float64, flat_logprobs
from treering.errors import InputError
from treering.objectives import Entries, dpo
from treering.train.step import backward
from treering.tree.forest import Forest

MODEL = build_float64()
SEQUENCES = [[5, 6, 7], [5, 6, 8], [5, 9]]
FOREST = Forest.from_sequences(SEQUENCES)
MASKS = [[0, 0, 1], [0, 1, 1], [0, 1]]


def entries_of(log_ratios: list[float], pairs: list[list[int]]) -> Entries:
    """Return entries with one token per branch."""
    return Entries(
        logprobs=torch.tensor(log_ratios, dtype=torch.float64),
        values={},
        branch=torch.arange(len(log_ratios)),
        num_branches=len(log_ratios),
        pairs=torch.tensor(pairs),
    )


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("sigmoid", [math.log(1 + math.exp(-0.2)), math.log(1 + math.exp(0.2))]),
        ("hinge", [0.8, 1.2]),
        ("ipo", [(2 - 5) ** 2, (-2 - 5) ** 2]),
    ],
)
def test_losses_by_hand(loss_type: str, expected: list[float]) -> None:
    terms = dpo([(0, 1), (1, 0)], beta=0.1, loss_type=loss_type).terms(entries_of([1.0, -1.0], [[0, 1], [1, 0]]))  # type: ignore[arg-type]
    assert terms.loss.tolist() == pytest.approx(expected)


def test_metrics_are_averages_over_pairs() -> None:
    result = backward(MODEL, FOREST, dpo([(0, 1), (2, 0), (1, 2)], MASKS, beta=0.5))
    MODEL.zero_grad(set_to_none=True)
    logprobs = [flat_logprobs(MODEL, sequence)[0].tolist() for sequence in SEQUENCES]
    rewards = [0.5 * logprobs[0][1], 0.5 * sum(logprobs[1]), 0.5 * logprobs[2][0]]
    chosen, rejected = [rewards[i] for i in (0, 2, 1)], [rewards[i] for i in (1, 0, 2)]
    assert result.averages == pytest.approx(
        {
            "reward_margin": sum(chosen) / 3 - sum(rejected) / 3,
            "accuracy": sum(c > r for c, r in zip(chosen, rejected, strict=True)) / 3,
            "chosen_reward": sum(chosen) / 3,
            "rejected_reward": sum(rejected) / 3,
        }
    )


def test_pairs_and_references_may_be_lists_arrays_or_tensors() -> None:
    sums, per_token = [-3.0, -4.5, -1.0], [[0, 0, -3.0], [0, -2.0, -2.5], [0, -1.0]]
    forms = [
        ([(0, 1), (2, 0)], sums),
        (np.array([[0, 1], [2, 0]]), np.array(sums)),
        (torch.tensor([[0, 1], [2, 0]]), torch.tensor(sums)),
        ([[0, 1], [2, 0]], [-3.0, np.array(per_token[1]), torch.tensor(per_token[2])]),
    ]
    losses = [backward(MODEL, FOREST, dpo(pairs, MASKS, reference)).loss for pairs, reference in forms]  # type: ignore[arg-type]
    MODEL.zero_grad(set_to_none=True)
    assert losses == pytest.approx([losses[0]] * len(forms), rel=1e-12)


@pytest.mark.parametrize("empty", [[], np.zeros((0, 2), int)])
def test_no_pair_is_a_loss_of_zero(empty: list[tuple[int, int]]) -> None:
    assert backward(MODEL, FOREST, dpo(empty)).loss == 0.0
    MODEL.zero_grad(set_to_none=True)


def test_what_does_not_fit_the_branches_is_refused() -> None:
    with pytest.raises(InputError, match="branch 3, and branches count from 0 to 2"):
        backward(MODEL, FOREST, dpo([(0, 3)]))
    with pytest.raises(InputError, match=r"ref_logprobs needs one item per branch.*got 2 for 3"):
        backward(MODEL, FOREST, dpo([(0, 1)], MASKS, [0.0, 1.0]))
    with pytest.raises(InputError, match=r"ref_logprobs\[1\] must be finite, got nan"):
        backward(MODEL, FOREST, dpo([(0, 1)], MASKS, [0.0, math.nan, 1.0]))
