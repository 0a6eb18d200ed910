"""Weights in shared memory: a ring of versions that the trainer writes and the rollout workers read.

There are no locks: a version is announced only after its slot is complete, and a slot is overwritten only when no
process needs its old version.

    S slots of the ring, plus one for the weights that a new trainer starts from
"""

import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from treering.errors import StateError
from treering.runtime.ipc.shared_memory import SharedMemory

_ALIGN = 64
_HEADER = struct.Struct("<qI")
"""Version, -1 while it is being written, and CRC-32 of the weights."""

BASE = -1
"""Names the slot beside the ring where a version is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """Where a tensor lies in a slot."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_values(self) -> int:
        """Values of the tensor."""
        return math.prod(self.shape)


def places_of(model: nn.Module) -> tuple[list[Place], int]:
    """Where each tensor of a model goes, tied ones once, and the bytes of a slot.

    Example: a float32 layer of weight [3, 2] and bias [3] has places at 0 and 64 in 128 bytes.
    """
    places, end = [], 0
    for name, tensor in _tensors(model).items():
        places.append(Place(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), offset=end))
        end += _padded(tensor.numel() * tensor.element_size())
    return places, end


class WeightRing:
    """The weights of the latest S versions of one model.

    Example: with 3 slots, after versions 0 to 4 were written, 2, 3 and 4 can be read, and 1 raises a StateError.
    """

    def __init__(self, model: nn.Module, num_slots: int, memory: SharedMemory | None = None) -> None:
        """`memory`: of a ring that another process has made for the same model; None makes one."""
        self._places, self._num_bytes = places_of(model)
        self.num_slots = num_slots
        self._stride = _ALIGN + self._num_bytes
        size = (num_slots + 1) * self._stride
        if memory is not None and len(memory.view) != size:
            raise StateError(
                f"all processes of a run build the same model, and this one needs {size:,} bytes of weights where the "
                f"run has {len(memory.view):,}; make the recipe's model depend on nothing but the recipe"
            )
        self.memory = SharedMemory(size) if memory is None else memory

    @property
    def num_bytes(self) -> int:
        """Bytes of one version."""
        return self._num_bytes

    def write(self, version: int, model: nn.Module, slot: int | None = None) -> None:
        """Copies a model's weights in as `version`, into its own slot of the ring or into `BASE`."""
        self.put(version, _tensors(model), slot)

    def put(self, version: int, tensors: Mapping[str, Tensor], slot: int | None = None) -> None:
        """`write` of tensors by name, as `tensors` gives them."""
        start = self._start(version, slot)
        self._set_header(start, -1, 0)
        with torch.no_grad():
            for place, target in self._slot_tensors(start):
                target.copy_(tensors[place.name])
        self._set_header(start, version, self._checksum(start))

    def read(self, version: int, model: nn.Module, slot: int | None = None) -> None:
        """Copies a version into a model.

        Raises:
            StateError: the slot holds another version, or is damaged.
        """
        start = self._checked(version, slot)
        own = _tensors(model)
        with torch.no_grad():
            for place, source in self._slot_tensors(start):
                own[place.name].copy_(source)

    def tensors(self, version: int) -> dict[str, Tensor]:
        """Copies of a version's tensors by name.

        Raises:
            StateError: as `read`.
        """
        return {place.name: source.clone() for place, source in self._slot_tensors(self._checked(version, None))}

    def close(self) -> None:
        """Gives the memory back once nothing refers to it."""
        self.memory.close()

    def _checked(self, version: int, slot: int | None) -> int:
        start = self._start(version, slot)
        found, checksum = _HEADER.unpack_from(self.memory.view, start)
        if found != version or checksum != self._checksum(start):
            raise StateError(
                f"weights of version {version} were to be read, and their slot holds version {found}"
                f"{'' if found != version else ', damaged'}; start again from the last checkpoint"
            )
        return start

    def _start(self, version: int, slot: int | None) -> int:
        return (self.num_slots if slot == BASE else version % self.num_slots) * self._stride

    def _set_header(self, start: int, version: int, checksum: int) -> None:
        _HEADER.pack_into(self.memory.view, start, version, checksum)

    def _checksum(self, start: int) -> int:
        with memoryview(self.memory.view) as everything:
            return zlib.crc32(everything[start + _ALIGN : start + self._stride])

    def _slot_tensors(self, start: int) -> list[tuple[Place, Tensor]]:
        found = []
        for place in self._places:
            if place.num_values == 0:
                continue
            offset = start + _ALIGN + place.offset
            flat = torch.frombuffer(self.memory.view, dtype=place.dtype, count=place.num_values, offset=offset)
            found.append((place, flat.view(place.shape)))
        return found


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's own tensors by name; of tied ones the first."""
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict().items():
        if tensor.numel() == 0 or tensor.data_ptr() not in seen:
            found[name] = tensor
            seen.add(tensor.data_ptr())
    return found


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
