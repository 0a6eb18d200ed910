"""Weights in Ray's object store: what is written is read, versions that fell out are refused."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

from treering.errors import StateError
from treering.integrations.ray.object_store import ObjectAccess, ObjectStore, Offers
from treering.runtime.ipc.weight_layout import model_tensors
from treering.runtime.ipc.weight_store import BASE, PublishedWeights

HOST = "127.0.0.1"


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2, dtype=torch.float64), nn.Linear(2, 5, dtype=torch.bfloat16))
    model.register_buffer("count", torch.tensor(seed))
    model.register_buffer("nothing", torch.zeros(0, 3))
    return model


def equal(first: nn.Module, second: nn.Module) -> bool:
    others = second.state_dict()
    return all(torch.equal(tensor, others[name]) for name, tensor in first.state_dict().items())


class Sent:
    """A port that keeps what it is given."""

    def __init__(self) -> None:
        self.messages: list[PublishedWeights] = []

    def send(self, message: PublishedWeights) -> None:
        self.messages.append(message)


@pytest.fixture
def store(ray_here: None) -> ObjectStore:
    return ObjectStore(model_of(0), 2)


def test_a_version_is_read_as_it_was_written(store: ObjectStore) -> None:
    for version in (4, 5):
        store.write(version, model_of(version))
    store.write(4, model_of(9), BASE)
    for version in (4, 5):
        read = model_of(0)
        store.read(version, read)
        assert equal(read, model_of(version))
        assert store.tensors(version)["count"] == version
    base = model_of(0)
    store.read(4, base, BASE)
    assert equal(base, model_of(9))


def test_a_version_that_fell_out_is_refused(store: ObjectStore) -> None:
    for version in (4, 5, 6):
        store.write(version, model_of(version))
    with pytest.raises(StateError, match="version 4"):
        store.read(4, model_of(0))
    with pytest.raises(StateError, match="version 7"):
        store.tensors(7)


def test_what_an_actor_publishes_the_controller_reads(store: ObjectStore) -> None:
    port = Sent()
    ObjectAccess(Offers(), HOST).open(model_of(0), port).put(3, model_tensors(model_of(7)))  # type: ignore[arg-type]
    (message,) = port.messages
    store.put_bytes(message.version, message.part)
    read = model_of(0)
    store.read(3, read)
    assert equal(read, model_of(7))


def test_an_actor_waits_for_the_version_that_it_needs() -> None:
    offers = Offers()
    weights = ObjectAccess(offers, HOST).open(model_of(0), Sent())  # type: ignore[arg-type]
    read = model_of(0)
    reader = threading.Thread(target=weights.read, args=(2, read))
    reader.start()
    for version in (1, 2):
        port = Sent()
        ObjectAccess(offers, HOST).open(model_of(0), port).put(version, model_tensors(model_of(version)))  # type: ignore[arg-type]
        payload = np.frombuffer(port.messages[0].part, np.uint8)
        payload.flags.writeable = False
        offers.add(version, None, payload)
    reader.join(60)
    assert equal(read, model_of(2))


def test_a_model_of_another_size_is_refused() -> None:
    offers = Offers()
    offers.add(1, None, np.zeros(64, np.uint8))
    with pytest.raises(StateError, match="all processes of a run build the same model"):
        ObjectAccess(offers, HOST).open(model_of(0), Sent()).read(1, model_of(0))  # type: ignore[arg-type]
