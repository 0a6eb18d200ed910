"""Find the recurrent states that each partition starts from and those it exports to the partitions below.

M tokens of a partition
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treering.attention.states import Boundary, StateGateway
from treering.tree.forest import Forest
from treering.tree.plan.partition import Partition


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
