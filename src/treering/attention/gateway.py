"""Pass keys, values and states between partitions of one tree through gateways, and gradients back.

The partitions of a tree run one at a time. A partition exports its keys and values, detached, to its gateway.
Partitions below read them and add gradients, which the partition's own backward then uses. Recurrent layers do the same
with the states at the cuts: for each token that a partition below continues from, the state after that token and the
last inputs of the convolution. Reads and writes go by layer index.

    G key heads   M tokens of the partition   D head size, or channels of the convolution   K its kernel size
    R boundary tokens
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.errors import StateError
from treering.tree.forest import Forest
from treering.tree.partition import Partition


class KeysValues(NamedTuple):
    """Keys and values [1, G, M, D], or their gradients."""

    key: Tensor
    value: Tensor


Entry = TypeVar("Entry", bound=tuple[Tensor, ...])


class Exports(Generic[Entry]):
    """Tensors that one partition exports to those below, by layer, and the gradients that these have added so far.

    Gradients are summed in float32 or the tensor's dtype, whichever is wider: sixteen summands in bfloat16 would cost
    0.5 % of accuracy, and 256 would cost 1.9 %.
    """

    def __init__(self) -> None:
        self._exports: dict[int, Entry] = {}
        self._gradients: dict[int, Entry] = {}
        self._is_open = True

    def export(self, layer: int, entry: Entry) -> None:
        """Keep a layer's tensors, detached, for partitions below; do nothing after `close`."""
        if self._is_open:
            self._exports[layer] = _each(Tensor.detach, entry)

    def read(self, layer: int) -> Entry:
        """Return a layer's tensors.

        Raises:
            StateError: the partition has not run, or its gateway is closed.
        """
        if layer not in self._exports:
            raise StateError(
                f"layer {layer} of an ancestor partition is missing: it must run before the partitions below it"
            )
        return self._exports[layer]

    def sums(self, layer: int) -> Entry:
        """Return the gradient sums of a layer, to add to in place; zeros at first."""
        if layer not in self._gradients:
            self._gradients[layer] = _each(_zeros, self.read(layer))
        return self._gradients[layer]

    def take_gradient(self, layer: int) -> Entry | None:
        """Remove and return the gradients that partitions below have added for a layer, or None."""
        return self._gradients.pop(layer, None)

    def close(self) -> None:
        """Free the tensors after the last read from below; keep their gradients."""
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
        """Add to the gradient of some rows of a layer: a range, or int64 indices without repetition."""
        add_rows(self.sums(layer), rows, gradient)


def add_rows(total: KeysValues, rows: slice | Tensor, part: KeysValues) -> None:
    """Add to some rows in place: a range, or int64 indices without repetition."""
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


class States(NamedTuple):
    """States of recurrent layers, one row per exported token, or the gradients of these states.

    Attributes:
        recurrent: [R, ...], float32 or wider.
        context: [R, D, K - 1], the last inputs of the convolution along the path, zeros before its root.
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
        """Add to the gradient of some rows (int64) of a layer's `recurrent` or `context`."""
        total: Tensor = getattr(self.sums(layer), name)
        total.index_add_(0, rows, gradient.to(total.dtype))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Boundary:
    """The states that a partition's recurrent layers start from, and its own states that it exports.

    Attributes:
        above: gateway of its parent partition; None for the top partition.
        slots: int64, the rows of `above` that it reads.
        start: int64 [M], the entry of `slots` that each of its tokens continues from; -1 where the parent token is in
            the partition itself, and everywhere in the top partition.
        left: int64 [R], its tokens whose state partitions below need, ascending; the rows of `gateway`.
        gateway: gateway that receives their states; None if R is 0.
    """

    above: StateGateway | None
    slots: NDArray[np.int64]
    start: NDArray[np.int64]
    left: NDArray[np.int64]
    gateway: StateGateway | None


def boundary_of(
    forest: Forest, partitions: Sequence[Partition], number: int, children: Sequence[int], above: Boundary | None
) -> Boundary:
    """Return the boundary of one partition of a tree.

    Args:
        forest: the whole tree.
        partitions: all partitions of the tree.
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
    left = _indices_of(tokens, hung_off[np.isin(hung_off, tokens)])
    start = np.full(tokens.size, -1)
    slots = np.empty(0, np.int64)
    if above is not None:
        is_root = ~np.isin(parent, tokens)
        continued, start[is_root] = np.unique(parent[is_root], return_inverse=True)
        slots = _indices_of(partitions[partitions[number].parent].tokens[above.left], continued)
    return Boundary(
        above=None if above is None else above.gateway,
        slots=slots,
        start=start,
        left=left,
        gateway=StateGateway() if left.size else None,
    )


def _indices_of(tokens: NDArray[np.int32], wanted: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the index of each wanted token in `tokens`; both are ascending."""
    indices = np.searchsorted(tokens, wanted).astype(np.int64)
    assert (tokens[indices] == wanted).all(), "a partition starts from tokens whose state its parent does not export"
    return indices
