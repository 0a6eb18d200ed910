"""Gateways of recurrent layers: the states at the cuts of a tree, and the gradients that come back to them.

The counterpart of `Gateway` for layers that carry a state along a path. For each token that a partition below continues
from, a partition exports the recurrent state after that token and the last inputs of the convolution.

    R boundary tokens   M tokens of the partition   D channels of the convolution   K its kernel size
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from treering.attention.gateway import Exports


class States(NamedTuple):
    """States of recurrent layers, one row per exported token, or the gradients of these states.

    Attributes:
        recurrent: [R, ...], float32 or wider.
        context: [R, D, K - 1], the convolution's last inputs along the path, zeros before its root.
    """

    recurrent: Tensor
    context: Tensor


class StateGateway(Exports[States]):
    """States of one partition's boundary tokens by layer, and the gradients that partitions below have added so far.

    Example:
        >>> import torch
        >>> gateway = StateGateway()
        >>> gateway.export(0, States(torch.ones(2, 3), torch.zeros(2, 4, 3)))
        >>> gateway.add_gradient(0, "recurrent", torch.tensor([1]), torch.ones(1, 3))
        >>> gateway.take_gradient(0).recurrent.sum(-1).tolist()
        [0.0, 3.0]
    """

    def add_gradient(self, layer: int, name: str, rows: Tensor, gradient: Tensor) -> None:
        """Adds to the gradient of some rows (int64) of a layer's `recurrent` or `context`."""
        total: Tensor = getattr(self.sums(layer), name)
        total.index_add_(0, rows, gradient.to(total.dtype))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Boundary:
    """Where the recurrent states of a partition come from, and which of its own it exports.

    Attributes:
        above: gateway of its parent partition; None for the top partition.
        slots: int64, the rows of `above` that it reads.
        start: int64 [M], for each of its tokens the entry of `slots` that it continues from; -1 where the parent token
            is in the partition itself, and everywhere in the top partition.
        left: int64 [R], its tokens whose state partitions below need, ascending: rows of `gateway`.
        gateway: receives their states; None if R is 0.
    """

    above: StateGateway | None
    slots: NDArray[np.int64]
    start: NDArray[np.int64]
    left: NDArray[np.int64]
    gateway: StateGateway | None
