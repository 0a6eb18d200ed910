"""Weights come back exactly as written, in the requested version, or are refused."""

import copy

import pytest
import torch
from torch import nn

from tests.runtime.in_process import TestActors
from treering.errors import StateError
from treering.runtime.weight_store import WeightStore, load_weights, model_tensors, weights_of


class Mixed(nn.Module):
    """Module with tensors of many types and shapes, two of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.tied = self.wide
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(7))


def same(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def shifted(model: nn.Module, seed: int) -> nn.Module:
    copied = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in copied.parameters():
            weight.add_(torch.randn_like(weight))
    return copied


def test_each_version_comes_back_bit_by_bit() -> None:
    versions = [shifted(Mixed(), seed) for seed in range(5)]
    store = WeightStore(TestActors(), 3)
    for version, weights in enumerate(versions):
        store.put(version, model_tensors(weights))
    for version in (2, 3, 4):
        target = Mixed()
        store.read(version, target)
        assert same(target, versions[version])
        assert target.tied is target.wide
        assert store.tensors(version, target)["count"].item() == 7
    for version in (1, 5):
        with pytest.raises(StateError, match=rf"version {version} .* has \[2, 3, 4\]"):
            store.read(version, Mixed())


def test_another_model_is_refused() -> None:
    weights = weights_of(model_tensors(nn.Linear(8, 2)))
    with pytest.raises(StateError, match="all processes of a run must build the same model"):
        load_weights(weights, nn.Linear(8, 3))
