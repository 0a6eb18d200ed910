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
from treering.train.loop.adapters import adapter_tensors, has_adapter

_ALIGN = 64
_HEADER = struct.Struct("<qI")
"""The version (-1 during a write) and the CRC-32 of the weights."""

BASE = -1
"""The `slot` argument for the extra slot outside the ring."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorLayout:
    """The position of a tensor in a slot."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_values(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


def tensor_layouts(model: nn.Module) -> tuple[list[TensorLayout], int]:
    """The layout of each tensor of a model, tied ones once, and the bytes of a slot.

    Example: a float32 layer with weight [3, 2] and bias [3] has offsets 0 and 64 in 128 bytes.
    """
    layouts, end = [], 0
    for name, tensor in _tensors(model).items():
        layouts.append(TensorLayout(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), offset=end))
        end += _padded(tensor.numel() * tensor.element_size())
    return layouts, end


class WeightRing:
    """The weights of the latest S versions of one model.

    Example: with 3 slots, after writing versions 0 to 4, versions 2, 3 and 4 can be read, and 1 raises StateError.
    """

    def __init__(self, model: nn.Module, num_slots: int, memory: SharedMemory | None = None) -> None:
        """`memory`: of a ring that another process made for the same model; None allocates it."""
        self._layouts, self._num_bytes = tensor_layouts(model)
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
        """Copies a model's weights into the ring as `version`, or into the slot `BASE`."""
        self.put(version, _tensors(model), slot)

    def put(self, version: int, tensors: Mapping[str, Tensor], slot: int | None = None) -> None:
        """As `write`, with tensors by name, as `tensors` returns them."""
        start = self._start(version, slot)
        self._set_header(start, -1, 0)
        with torch.no_grad():
            for layout, target in self._slot_tensors(start):
                target.copy_(tensors[layout.name])
        self._set_header(start, version, self._checksum(start))

    def read(self, version: int, model: nn.Module, slot: int | None = None) -> None:
        """Copies a version into a model.

        Raises:
            StateError: the slot holds another version, or is damaged.
        """
        start = self._checked(version, slot)
        own = _tensors(model)
        with torch.no_grad():
            for layout, source in self._slot_tensors(start):
                own[layout.name].copy_(source)

    def tensors(self, version: int) -> dict[str, Tensor]:
        """Copies of a version's tensors by name.

        Raises:
            StateError: see `read`.
        """
        return {layout.name: source.clone() for layout, source in self._slot_tensors(self._checked(version, None))}

    def close(self) -> None:
        """Frees the memory once nothing refers to it."""
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
            return zlib.crc32(everything[start + _ALIGN : start + self._stride])

    def _slot_tensors(self, start: int) -> list[tuple[TensorLayout, Tensor]]:
        found = []
        for layout in self._layouts:
            if layout.num_values == 0:
                continue
            offset = start + _ALIGN + layout.offset
            flat = torch.frombuffer(self.memory.view, dtype=layout.dtype, count=layout.num_values, offset=offset)
            found.append((layout, flat.view(layout.shape)))
        return found


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors by name; of tied ones the first, and of a model with adapters those alone."""
    seen: set[int] = set()
    found = {}
    weights = model.state_dict()
    for name, tensor in (adapter_tensors(model, weights) if has_adapter(model) else weights).items():
        if tensor.numel() == 0 or tensor.data_ptr() not in seen:
            found[name] = tensor
            seen.add(tensor.data_ptr())
    return found


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
