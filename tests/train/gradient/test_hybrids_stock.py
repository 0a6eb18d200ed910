"""Laws 2 and 4 for stock recurrent layers: scans compute in float32, the rest in bfloat16."""

import pytest
import torch
from torch import Tensor, nn

from tests.forests import SHAPES, bushy
from tests.hybrids import DENSE, HYBRIDS, PLANNINGS, build_hybrid, planned
from tests.models import global_norm, take_gradients
from tests.partitions import random_partitions
from tests.train.flat import flat_loss
from tests.train.gradient.test_backward import batch_of
from tests.train.gradient.test_partitioned import cut_by
from treering.objectives import sft
from treering.train.step import backward
from treering.tree.forest import Forest

SEQUENCES = [*SHAPES["long segments"], *bushy(6)]


def tree_gradients(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    batch = batch_of([SEQUENCES], seed)
    backward(model, Forest.from_sequences(SEQUENCES), sft(batch.masks))
    return take_gradients(model)


def flat_gradients(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    flat_loss(model, batch_of([SEQUENCES], seed), kind="sft", normalizer="token_mean").backward()  # type: ignore[no-untyped-call]
    return take_gradients(model)


def distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the error of the whole gradient, relative to its norm."""
    return global_norm({name: actual[name].double() - expected[name].double() for name in expected}) / global_norm(
        expected
    )


@pytest.mark.parametrize("family", HYBRIDS)
def test_stock_code_stays_within_1e_6_of_the_whole_gradient(family: str) -> None:
    model = build_hybrid(family).double()
    expected = flat_gradients(model)
    for planning in PLANNINGS:
        with planned(planning):
            assert distance(tree_gradients(model), expected) <= 1e-6
    with cut_by(lambda tree: random_partitions(tree, 1, 30, cut=0.05)):
        assert distance(tree_gradients(model), expected) <= 1e-6


@pytest.mark.parametrize("family", DENSE)
def test_bfloat16_strays_no_further_than_1_1_times_the_flat_run(family: str) -> None:
    ratios = []
    for seed in range(15):
        reference = flat_gradients(build_hybrid(family, seed), seed)
        model = build_hybrid(family, seed).bfloat16()
        with planned("fork, padded"):
            tree = distance(tree_gradients(model, seed), reference)
        ratios.append(tree / distance(flat_gradients(model, seed), reference))
    assert sorted(ratios)[7] <= 1.1


@pytest.mark.parametrize("family", DENSE)
def test_autocast_to_bfloat16_is_close_to_float32(family: str) -> None:
    model = build_hybrid(family)
    expected = tree_gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        actual = tree_gradients(model)
        with cut_by(lambda tree: random_partitions(tree, 1, 30, cut=0.05)):
            in_partitions = tree_gradients(model)
    assert distance(actual, expected) <= 0.1
    assert distance(in_partitions, expected) <= 0.1
