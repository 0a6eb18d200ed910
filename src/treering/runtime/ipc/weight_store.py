"""The protocols of the weights' way from the trainer to the rollout workers."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

BASE = -1
"""The `slot` argument for the weights that a new trainer starts from, outside the ring of versions."""


class WeightStore(Protocol):
    """The controller's store of the weights' latest versions, by version, and of the base of a new trainer.

    There are no locks: a version is announced only after it is complete, and is dropped only when no process needs it.
    """

    @property
    def num_slots(self) -> int:
        """Versions that it holds."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one version."""

    def write(self, version: int, model: nn.Module, slot: int | None = None) -> None:
        """Copies a model's weights into the store as `version`, or as the base (`slot=BASE`)."""

    def put(self, version: int, tensors: Mapping[str, Tensor], slot: int | None = None) -> None:
        """As `write`, with tensors by name, as `tensors` returns them."""

    def put_bytes(self, version: int, payload: bytes | bytearray) -> None:
        """As `put`, with the bytes of all tensors as `WeightLayout.pack` of the same model lays them out."""

    def read(self, version: int, model: nn.Module, slot: int | None = None) -> None:
        """Copies a version into a model.

        Raises:
            StateError: the store does not hold it, or it is damaged.
        """

    def tensors(self, version: int) -> dict[str, Tensor]:
        """Copies of a version's tensors by name.

        Raises:
            StateError: see `read`.
        """

    def close(self) -> None:
        """Frees the memory once nothing refers to it."""


class ProcessWeights(Protocol):
    """A process's side of the store."""

    def read(self, version: int, model: nn.Module, slot: int | None = None) -> None:
        """Copies a version that was offered to this process into a model; see `WeightStore.read`."""

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Publishes a model's tensors by name (`model_tensors`); a message sent afterwards finds them in the store."""
