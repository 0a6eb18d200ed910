"""Where the tensors of a model stand in a flat buffer, the same in every process that builds the model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from treering.train.loop.adapters import adapter_tensors, has_adapter

_ALIGN = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorLayout:
    """The position of a tensor in a buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_values(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


class WeightLayout:
    """The layout of all tensors of a model, tied ones once.

    Example: a float32 layer with weight [3, 2] and bias [3] has offsets 0 and 64 in 128 bytes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layouts, self.num_bytes = [], 0
        for name, tensor in model_tensors(model).items():
            layout = TensorLayout(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), offset=self.num_bytes)
            self._layouts.append(layout)
            self.num_bytes += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN

    def views(self, buffer: object, start: int = 0) -> dict[str, Tensor]:
        """The tensors by name, as views of a buffer that holds them from byte `start` on; empty ones are left out."""
        return {
            layout.name: torch.frombuffer(
                buffer, dtype=layout.dtype, count=layout.num_values, offset=start + layout.offset
            ).view(layout.shape)
            for layout in self._layouts
            if layout.num_values > 0
        }

    def fill(self, buffer: object, tensors: Mapping[str, Tensor], start: int = 0) -> None:
        """Copies tensors into a buffer."""
        with torch.no_grad():
            for name, target in self.views(buffer, start).items():
                target.copy_(tensors[name])

    def load(self, buffer: object, model: nn.Module, start: int = 0) -> None:
        """Copies a buffer's tensors into a model."""
        own = model_tensors(model)
        with torch.no_grad():
            for name, source in self.views(buffer, start).items():
                own[name].copy_(source)

    def pack(self, tensors: Mapping[str, Tensor]) -> bytearray:
        """A new buffer with the tensors."""
        buffer = bytearray(self.num_bytes)
        self.fill(buffer, tensors)
        return buffer


def model_tensors(model: nn.Module, whole: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The model's tensors by name; of tied ones the first, and of a model with adapters those alone.

    `whole`: the tensors of a sharded model, as `whole_state_dict` gathers them.
    """
    seen: set[int] = set()
    found = {}
    weights = model.state_dict() if whole is None else whole
    for name, tensor in (adapter_tensors(model, weights) if has_adapter(model) else weights).items():
        if tensor.numel() == 0 or tensor.data_ptr() not in seen:
            found[name] = tensor
            seen.add(tensor.data_ptr())
    return found
