"""The weight ring and messages return exactly the written weights of the requested version, or refuse."""

import copy

import pytest
import torch
from torch import nn

from treering.errors import StateError
from treering.runtime.ipc import weight_store
from treering.runtime.ipc.weight_ring import WeightRing
from treering.runtime.ipc.weight_store import BASE, IncomingWeights, parts_of


class Mixed(nn.Module):
    """Tensors of many types and shapes, two of them tied."""

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
    model = Mixed()
    versions = [shifted(model, seed) for seed in range(5)]
    ring = WeightRing(model, 3)
    for version, weights in enumerate(versions):
        ring.write(version, weights)
    for version in (2, 3, 4):
        target = Mixed()
        ring.read(version, target)
        assert same(target, versions[version])
        assert target.tied is target.wide
        assert ring.tensors(version)["count"].item() == 7
    with pytest.raises(StateError, match=r"version 1 .* holds version 4"):
        ring.read(1, Mixed())


def test_the_base_lies_beside_the_ring() -> None:
    model = Mixed()
    ring = WeightRing(model, 2)
    base = shifted(model, 9)
    ring.write(4, base, BASE)
    for version in range(4, 8):
        ring.write(version, shifted(model, version))
    target = Mixed()
    ring.read(4, target, BASE)
    assert same(target, base)


@pytest.mark.parametrize("place", ["first", "last"])
def test_damaged_weights_are_refused(place: str) -> None:
    model = nn.Linear(8, 2, bias=False)
    ring = WeightRing(model, 1)
    ring.write(0, model)
    # Behind the header of 64 bytes lie 16 float32 numbers.
    position = 64 if place == "first" else 64 + 63
    ring.memory.view[position] ^= 1
    with pytest.raises(StateError, match="damaged"):
        ring.read(0, model)


def test_what_was_written_in_part_is_refused() -> None:
    model = nn.Linear(8, 2, bias=False)
    ring = WeightRing(model, 1)
    ring.write(3, model)

    def stop(*_: object) -> int:
        raise KeyboardInterrupt

    ring._checksum = stop  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        ring.write(4, model)
    del ring._checksum
    for version in (3, 4):
        with pytest.raises(StateError, match="holds version -1"):
            ring.read(version, model)


def test_another_model_is_refused() -> None:
    ring = WeightRing(nn.Linear(8, 2), 2)
    with pytest.raises(StateError, match="all processes of a run build the same model"):
        WeightRing(nn.Linear(8, 3), 2, ring.memory)


WEIGHTS = bytes(range(100))


@pytest.mark.parametrize("part_bytes", [1, 33, 50, 100, 101])
def test_the_parts_make_the_weights(part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_store, "PART_BYTES", part_bytes)
    incoming = IncomingWeights()
    for version in (1, 2):
        *firsts, last = parts_of(version, WEIGHTS)
        assert len(firsts) == (100 - 1) // part_bytes
        assert [incoming.take(part) for part in firsts] == [None] * len(firsts)
        assert incoming.take(last) == WEIGHTS


def test_a_new_trainer_starts_from_the_first_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_store, "PART_BYTES", 60)
    incoming = IncomingWeights()
    assert incoming.take(next(parts_of(1, WEIGHTS))) is None
    first, last = parts_of(1, WEIGHTS[::-1])
    assert incoming.take(first) is None
    assert incoming.take(last) == WEIGHTS[::-1]
