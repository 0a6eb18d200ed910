"""Gateways: how partitions of one tree see each other's keys and values, and how gradients come back.

The partitions of a tree run one at a time. A partition exports its keys and values, detached, to its gateway;
partitions below read them and add gradients; the partition's own backward then takes these gradients where its keys and
values were computed. Attention reads and writes by layer number.

    G key heads   M tokens of the partition   D head size
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from treering.errors import StateError


class KeysValues(NamedTuple):
    """Keys and values [1, G, M, D], or their gradients."""

    key: Tensor
    value: Tensor


Entry = TypeVar("Entry", bound=tuple[Tensor, ...])


class Exports(Generic[Entry]):
    """Tensors that one partition exports to those below, by layer, and the gradients that these have added so far.

    Gradients are summed in float32 or the tensor's dtype, whichever is wider: sixteen bfloat16 summands would cost half
    a percent (reference: 0.5 % at 16, 1.9 % at 256).
    """

    def __init__(self) -> None:
        self._exports: dict[int, Entry] = {}
        self._gradients: dict[int, Entry] = {}
        self._is_open = True

    def export(self, layer: int, entry: Entry) -> None:
        """Keeps a layer's tensors, detached, for partitions below; does nothing after `close`."""
        if self._is_open:
            self._exports[layer] = _each(Tensor.detach, entry)

    def read(self, layer: int) -> Entry:
        """A layer's tensors.

        Raises:
            StateError: the partition has not run, or its gateway is closed.
        """
        if layer not in self._exports:
            raise StateError(f"layer {layer} of an ancestor partition is not there: it must run before those below it")
        return self._exports[layer]

    def sums(self, layer: int) -> Entry:
        """The gradient sums of a layer, to add to in place; zeros at first."""
        if layer not in self._gradients:
            self._gradients[layer] = _each(_zeros, self.read(layer))
        return self._gradients[layer]

    def take_gradient(self, layer: int) -> Entry | None:
        """Removes and returns the gradients that partitions below have added for a layer; None if there are none."""
        return self._gradients.pop(layer, None)

    def close(self) -> None:
        """Frees the tensors after the last read from below; keeps their gradients."""
        self._is_open = False
        self._exports.clear()


class Gateway(Exports[KeysValues]):
    """Keys and values of one partition by layer, and the gradients that partitions below have added so far.

    Example:
        >>> gateway = Gateway()
        >>> gateway.export(0, KeysValues(torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 2, 4)))
        >>> gateway.add_gradient(0, slice(0, 1), KeysValues(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4)))
        >>> gateway.take_gradient(0).key[0, 0].sum(-1).tolist()
        [4.0, 0.0]
    """

    def add_gradient(self, layer: int, rows: slice | Tensor, gradient: KeysValues) -> None:
        """Adds to the gradient of some rows of a layer: a range, or int64 indices without repetition."""
        add_rows(self.sums(layer), rows, gradient)


def add_rows(total: KeysValues, rows: slice | Tensor, part: KeysValues) -> None:
    """Adds to some rows in place: a range, or int64 indices without repetition."""
    for sums, more in zip(total, part, strict=True):
        if isinstance(rows, slice):
            sums[:, :, rows] += more
        else:
            sums.index_add_(2, rows, more.to(sums.dtype))


def _each(change: Callable[[Tensor], Tensor], entry: Entry) -> Entry:
    make: Any = type(entry)
    return make(*map(change, entry))  # type: ignore[no-any-return]


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
