"""Weights in shared memory: a ring of versions that the trainer writes and the rollout workers read.

A ring has a slot for each version, and one more for the weights that a new trainer starts from.
"""

import struct
import zlib
from collections.abc import Mapping

from torch import Tensor, nn

from treering.errors import StateError
from treering.runtime.ipc.shared_memory import SharedMemory
from treering.runtime.ipc.weight_store import BASE, WeightStore

_HEADER = struct.Struct("<qI")
"""The version (-1 during a write) and the CRC-32 of the weights."""

_HEADER_BYTES = 64
"""The header with its padding."""


class WeightRing(WeightStore):
    """The weights of the latest S versions of one model, for processes on one host.

    Example: with 3 slots, after writing versions 0 to 4, versions 2, 3 and 4 can be read, and 1 raises StateError.
    """

    def __init__(self, model: nn.Module, num_slots: int, memory: SharedMemory | None = None) -> None:
        """`memory`: of a ring that another process made for the same model; None allocates it."""
        super().__init__(model, num_slots)
        self._stride = _HEADER_BYTES + self.num_bytes
        size = (num_slots + 1) * self._stride
        if memory is not None and len(memory.view) != size:
            raise StateError(
                f"all processes of a run build the same model, and this one needs {size:,} bytes of weights where the "
                f"run has {len(memory.view):,}; make the recipe's model depend on nothing but the recipe"
            )
        self.memory = SharedMemory(size) if memory is None else memory

    def put(self, version: int, tensors: Mapping[str, Tensor], slot: int | None = None) -> None:
        """See `WeightStore`."""
        start = self._start(version, slot)
        self._set_header(start, -1, 0)
        self._layout.fill(self.memory.view, tensors, start + _HEADER_BYTES)
        self._set_header(start, version, self._checksum(start))

    def put_bytes(self, version: int, payload: bytes | bytearray) -> None:
        """See `WeightStore`."""
        start = self._start(version, None)
        self._set_header(start, -1, 0)
        self.memory.view[start + _HEADER_BYTES : start + self._stride] = payload
        self._set_header(start, version, self._checksum(start))

    def read(self, version: int, model: nn.Module, slot: int | None = None) -> None:
        """See `WeightStore`."""
        self._layout.load(self.memory.view, model, self._checked(version, slot) + _HEADER_BYTES)

    def tensors(self, version: int) -> dict[str, Tensor]:
        """See `WeightStore`."""
        views = self._layout.views(self.memory.view, self._checked(version, None) + _HEADER_BYTES)
        return {name: source.clone() for name, source in views.items()}

    def close(self) -> None:
        """See `WeightStore`."""
        self.memory.close()

    def _checked(self, version: int, slot: int | None) -> int:
        start = self._start(version, slot)
        found, checksum = _HEADER.unpack_from(self.memory.view, start)
        if found != version or checksum != self._checksum(start):
            raise StateError(
                f"weights of version {version} are needed, and their slot holds version {found}"
                f"{'' if found != version else ', damaged'}; start again from the last checkpoint"
            )
        return start

    def _start(self, version: int, slot: int | None) -> int:
        return (self.num_slots if slot == BASE else version % self.num_slots) * self._stride

    def _set_header(self, start: int, version: int, checksum: int) -> None:
        _HEADER.pack_into(self.memory.view, start, version, checksum)

    def _checksum(self, start: int) -> int:
        with memoryview(self.memory.view) as everything:
            return zlib.crc32(everything[start + _HEADER_BYTES : start + self._stride])
