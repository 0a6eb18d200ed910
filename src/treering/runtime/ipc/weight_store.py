"""The weights' way from the trainer to the rollout workers: stores, and messages where no memory is shared."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from treering.runtime.ipc.weight_layout import WeightLayout, model_tensors

BASE = -1
"""The `slot` argument for the weights that a new trainer starts from, outside the ring of versions."""


PART_BYTES = 4 << 20
"""Of a part, at most."""


class WeightStore(ABC):
    """The controller's store of the weights' latest versions, by version, and of the base of a new trainer.

    There are no locks: a version is announced only after it is complete, and is dropped only when no process needs it.
    """

    def __init__(self, model: nn.Module, num_slots: int) -> None:
        """Holds `num_slots` versions of the weights of models like this one, and none yet."""
        self._layout = WeightLayout(model)
        self.num_slots = num_slots

    @property
    def num_bytes(self) -> int:
        """Bytes of one version."""
        return self._layout.num_bytes

    def write(self, version: int, model: nn.Module, slot: int | None = None) -> None:
        """Copies a model's weights into the store as `version`, or as the base (`slot=BASE`)."""
        self.put(version, model_tensors(model), slot)

    @abstractmethod
    def put(self, version: int, tensors: Mapping[str, Tensor], slot: int | None = None) -> None:
        """As `write`, with tensors by name, as `tensors` returns them."""

    @abstractmethod
    def put_bytes(self, version: int, payload: bytes | bytearray) -> None:
        """As `put`, with the bytes of all tensors as `WeightLayout.pack` of the same model lays them out."""

    @abstractmethod
    def read(self, version: int, model: nn.Module, slot: int | None = None) -> None:
        """Copies a version into a model.

        Raises:
            StateError: the store does not hold it, or it is damaged.
        """

    @abstractmethod
    def tensors(self, version: int) -> dict[str, Tensor]:
        """Copies of a version's tensors by name.

        Raises:
            StateError: see `read`.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees the memory once nothing refers to it."""


class ProcessWeights(Protocol):
    """A process's side of the store."""

    def read(self, version: int, model: nn.Module, slot: int | None = None) -> None:
        """Copies a version that was offered to this process into a model; see `WeightStore.read`."""

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Publishes a model's tensors by name (`model_tensors`); a message sent afterwards finds them in the store."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PublishedWeights:
    """One part of the weights of a version."""

    version: int
    num_bytes: int
    """Of all parts."""
    offset: int
    """Where this part begins."""
    part: bytes


def parts_of(version: int, weights: bytes | bytearray) -> Iterator[PublishedWeights]:
    """The messages of weights that `WeightLayout.pack` has laid out; at least one."""
    view = memoryview(weights)
    for offset in range(0, max(len(weights), 1), PART_BYTES):
        part = bytes(view[offset : offset + PART_BYTES])
        yield PublishedWeights(version=version, num_bytes=len(weights), offset=offset, part=part)


class IncomingWeights:
    """Puts the parts of one version after another together.

    Example: of two parts the first returns None and the second the weights; the first of a new trainer starts again.
    """

    def __init__(self) -> None:
        self._weights = bytearray()

    def take(self, message: PublishedWeights) -> bytearray | None:
        """Adds the next part; returns all of them after the last one."""
        if message.offset == 0:
            self._weights = bytearray()
        assert message.offset == len(self._weights), "parts come in order"
        self._weights += message.part
        if len(self._weights) < message.num_bytes:
            return None
        weights, self._weights = self._weights, bytearray()
        return weights
