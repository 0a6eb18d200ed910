"""Gateways of recurrent layers: the states at the cuts of a tree, and the gradients that come back to them.

The counterpart of `Gateway` for layers that carry a state along a path. For each token that a partition below continues
from, a partition exports the recurrent state after that token and the last inputs of the convolution.

    R boundary tokens   M tokens of the partition   D channels of the convolution   K its kernel size
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from treering.attention.gateway import Exports
from treering.tree.forest import Forest
from treering.tree.plan.partition import Partition


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


def boundary_of(
    forest: Forest, partitions: Sequence[Partition], number: int, children: Sequence[int], above: Boundary | None
) -> Boundary:
    """The boundary of one partition of a tree.

    Args:
        forest: the whole tree.
        partitions: of the tree.
        number: index of the partition.
        children: indices of its child partitions that will run.
        above: boundary of its parent partition; None for the top one.

    Example: the chain 5, 6, 7 cut after 6: the first partition exports the state after its token 1, and token 0 of the
    second starts from it.
    """
    tokens = partitions[number].tokens
    parent = forest.parent[tokens]
    below = [forest.parent[partitions[child].tokens] for child in children]
    hung_off = np.unique(np.concatenate([*below, np.empty(0, np.int32)]))
    left = _places(tokens, hung_off[np.isin(hung_off, tokens)])
    start = np.full(tokens.size, -1)
    slots = np.empty(0, np.int64)
    if above is not None:
        is_root = ~np.isin(parent, tokens)
        continued, start[is_root] = np.unique(parent[is_root], return_inverse=True)
        slots = _places(partitions[partitions[number].parent].tokens[above.left], continued)
    return Boundary(
        above=None if above is None else above.gateway,
        slots=slots,
        start=start,
        left=left,
        gateway=StateGateway() if left.size else None,
    )


def _places(tokens: NDArray[np.int32], wanted: NDArray[np.int32]) -> NDArray[np.int64]:
    """Index of each wanted token in `tokens`; both are ascending."""
    places = np.searchsorted(tokens, wanted).astype(np.int64)
    assert (tokens[places] == wanted).all(), "a partition starts from tokens whose state its parent does not export"
    return places
