"""Gateways of recurrent layers: the states at the cuts of a tree, and how their gradients come back.

What `Gateway` is for keys and values, for layers that carry a state along a path. A partition leaves, for each of its
tokens that tokens of partitions below hang off, the recurrent state behind it and the last inputs of the convolution.
Knows no trees and no models.

    R boundary tokens   M tokens of the partition   D channels of the convolution   K its kernel size
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.errors import StateError


class States(NamedTuple):
    """What recurrent layers carry from token to token, one row per token that was left, or the gradients of it.

    Attributes:
        recurrent: [R, ...], float32 or wider.
        context: [R, D, K - 1], the convolution's last inputs along the path, zeros before its root.
    """

    recurrent: Tensor
    context: Tensor


class StateGateway:
    """States of one partition's boundary tokens by layer, and the gradients that partitions below have left so far.

    Gradients are summed in float32 or the state's dtype, whichever is wider.

    Example:
        >>> gateway = StateGateway()
        >>> gateway.export(0, States(torch.ones(2, 3), torch.zeros(2, 4, 3)))
        >>> gateway.add_gradient(0, "recurrent", torch.tensor([1]), torch.ones(1, 3))
        >>> gateway.take_gradient(0).recurrent.sum(-1).tolist()
        [0.0, 3.0]
    """

    def __init__(self) -> None:
        self._exports: dict[int, States] = {}
        self._gradients: dict[int, States] = {}
        self._is_open = True

    def export(self, layer: int, states: States) -> None:
        """Holds a layer's states for partitions below; nothing once the gateway is closed."""
        if self._is_open:
            self._exports[layer] = States(states.recurrent.detach(), states.context.detach())

    def read(self, layer: int) -> States:
        """A layer's states.

        Raises:
            StateError: the partition has not run, or its gateway is closed.
        """
        if layer not in self._exports:
            raise StateError(f"layer {layer} of an ancestor partition is not there: it must run before those below it")
        return self._exports[layer]

    def add_gradient(self, layer: int, name: str, rows: Tensor, gradient: Tensor) -> None:
        """Adds to the gradient of some rows (int64) of a layer's `recurrent` or `context`."""
        if layer not in self._gradients:
            self._gradients[layer] = States(*(_zeros(tensor) for tensor in self.read(layer)))
        sums: Tensor = getattr(self._gradients[layer], name)
        sums.index_add_(0, rows, gradient.to(sums.dtype))

    def take_gradient(self, layer: int) -> States | None:
        """What partitions below have left for a layer, once; None if nothing."""
        return self._gradients.pop(layer, None)

    def close(self) -> None:
        """No partition below will read any more: frees the states, keeps their gradients."""
        self._is_open = False
        self._exports.clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Boundary:
    """Where the recurrent states of a partition come from, and which of its own it leaves.

    Attributes:
        above: of the partition that it hangs off; None for the top one.
        slots: int64, the rows of `above` that are read.
        start: int64 [M], for each of its tokens the entry of `slots` that it continues; -1 where its parent token is
            one of its own, and everywhere in the top one.
        left: int64 [R], its tokens that partitions below hang off, ascending: rows of `gateway`.
        gateway: where their states are left; None where R is 0.
    """

    above: StateGateway | None
    slots: NDArray[np.int64]
    start: NDArray[np.int64]
    left: NDArray[np.int64]
    gateway: StateGateway | None


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
