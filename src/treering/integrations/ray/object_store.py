"""The weights of a run in Ray's object store, which brings them to the hosts of the workers.

An object dies with its owner, so the controller owns all of them: the trainer sends it the weights of each step, and it
offers them to the actors that need them.
"""

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch import Tensor, nn

from treering.errors import StateError
from treering.runtime.ipc.child import Port
from treering.runtime.ipc.weight_layout import WeightLayout
from treering.runtime.ipc.weight_store import BASE, WeightStore, parts_of

if TYPE_CHECKING:
    from ray import ObjectRef

_Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


class ObjectStore(WeightStore):
    """The `WeightStore` of actors.

    Example: with 3 slots, after writing versions 0 to 4, versions 2, 3 and 4 can be read, and 1 raises StateError.
    """

    def __init__(self, model: nn.Module, num_slots: int) -> None:
        """Holds nothing yet. Ray is initialised."""
        super().__init__(model, num_slots)
        self._refs: dict[int, ObjectRef[_Bytes]] = {}
        self._base: tuple[int, ObjectRef[_Bytes]] | None = None

    def put(self, version: int, tensors: Mapping[str, Tensor], slot: int | None = None) -> None:
        """See `WeightStore`."""
        self._keep(version, self._layout.pack(tensors), slot)

    def put_bytes(self, version: int, payload: bytes | bytearray) -> None:
        """See `WeightStore`."""
        self._keep(version, payload, None)

    def read(self, version: int, model: nn.Module, slot: int | None = None) -> None:
        """See `WeightStore`."""
        with _reading():
            self._layout.load(self._bytes(version, slot), model)

    def tensors(self, version: int) -> dict[str, Tensor]:
        """See `WeightStore`."""
        with _reading():
            views = self._layout.views(self._bytes(version, None))
            return {name: source.clone() for name, source in views.items()}

    def ref(self, version: int, slot: int | None = None) -> "ObjectRef[_Bytes]":
        """The object of a version, to pass to an actor.

        Raises:
            StateError: see `read`.
        """
        base = {} if self._base is None else dict([self._base])
        found = (base if slot == BASE else self._refs).get(version)
        if found is None:
            raise StateError(
                f"weights of version {version} are needed, and the store holds {sorted(self._refs)}; start again from "
                "the last checkpoint"
            )
        return found

    def close(self) -> None:
        """See `WeightStore`."""
        self._refs.clear()
        self._base = None

    def _bytes(self, version: int, slot: int | None) -> _Bytes:
        import ray

        found: _Bytes = ray.get(self.ref(version, slot))
        return found

    def _keep(self, version: int, payload: bytes | bytearray, slot: int | None) -> None:
        import ray

        # An array and not the bytes, because Ray copies an array once and gives views of it.
        ref = ray.put(np.frombuffer(payload, np.uint8))
        if slot == BASE:
            self._base = (version, ref)
            return
        self._refs[version] = ref
        self._refs = {known: each for known, each in self._refs.items() if known > version - self.num_slots}


@contextmanager
def _reading() -> Iterator[None]:
    """Silences torch, which warns of every tensor in memory that it must not write."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        yield


class Offers:
    """The weights that the controller has offered to this actor; used by two threads."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._offered: dict[tuple[int, int | None], _Bytes] = {}

    def add(self, version: int, slot: int | None, weights: _Bytes) -> None:
        """Adds weights, which replace earlier ones that nobody has taken."""
        with self._condition:
            self._offered = {key: each for key, each in self._offered.items() if key[1] != slot}
            self._offered[version, slot] = weights
            self._condition.notify_all()

    def take(self, version: int, slot: int | None) -> _Bytes:
        """Waits for an offer, and removes it."""
        with self._condition:
            self._condition.wait_for(lambda: (version, slot) in self._offered)
            return self._offered.pop((version, slot))


class ObjectAccess:
    """What an actor needs to read and write weights."""

    def __init__(self, offers: Offers, host: str) -> None:
        self._offers = offers
        self.host = host

    def open(self, model: nn.Module, port: Port) -> "OfferedWeights":
        """See `WeightAccess`."""
        return OfferedWeights(model, port, self._offers)


class OfferedWeights:
    """An actor's side of the store: reads what is offered, and sends what it writes to the controller."""

    def __init__(self, model: nn.Module, port: Port, offers: Offers) -> None:
        self._layout = WeightLayout(model)
        self._port = port
        self._offers = offers

    def read(self, version: int, model: nn.Module, slot: int | None = None) -> None:
        """See `ProcessWeights`. Waits for the offer.

        Raises:
            StateError: the model is another than the controller's.
        """
        weights = self._offers.take(version, slot)
        if weights.nbytes != self._layout.num_bytes:
            raise StateError(
                f"all processes of a run build the same model, and this one needs {self._layout.num_bytes:,} bytes of "
                f"weights where the run has {weights.nbytes:,}; make the recipe's model depend on nothing but the "
                "recipe"
            )
        with _reading():
            self._layout.load(weights, model)

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See `ProcessWeights`."""
        for message in parts_of(version, self._layout.pack(tensors)):
            self._port.send(message)
