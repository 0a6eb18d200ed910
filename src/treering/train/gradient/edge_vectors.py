"""Convert between scores of a table's edges and vectors over a forest, and apply a loss's gradient to them.

Any backward splits in two: the gradient of the loss with respect to the scores, and the model's vector-Jacobian product
with it. This file holds the tensors in between.

    N tokens
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from treering.arrays import Int64Array
from treering.attention.to_device import to_device
from treering.model.edges import EdgeScores, EdgeTable


def put_scores(everywhere: EdgeScores, scores: EdgeScores, table: EdgeTable) -> None:
    """Writes the scores of a table's edges, without gradients, to their packed indices in `everywhere` [N]."""
    at = to_device(table.edges, everywhere.logprobs.device)
    for target, part in _pairs(everywhere, scores):
        target.index_copy_(0, at, part.detach().to(target.dtype))


def joined_leaves(scores: Sequence[EdgeScores]) -> EdgeScores:
    """Scores of several forests one after another, as leaves that take gradients."""
    return _by_field(scores, lambda tensors: torch.cat(tensors).requires_grad_())


def split_gradients(leaves: EdgeScores, sizes: Sequence[int]) -> list[EdgeScores]:
    """The leaves' gradients split into forests of these sizes; zeros if a leaf has no gradient."""
    ends = np.cumsum(sizes).tolist()

    def part(leaf: Tensor, number: int) -> Tensor:
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        return gradient[ends[number] - sizes[number] : ends[number]]

    return [
        _by_field([leaves], lambda tensors, number=number: part(tensors[0], number))  # type: ignore[misc]
        for number in range(len(sizes))
    ]


def vector_product(scores: EdgeScores, vectors: EdgeScores, edges: Int64Array) -> Tensor:
    """A scalar whose gradient with respect to the scores is the vectors at their edges, packed indices."""
    at = to_device(edges, scores.logprobs.device)
    products = [(score * vector[at]).sum() for score, vector in _pairs(scores, vectors) if score.requires_grad]
    return sum(products, start=scores.logprobs.new_zeros(()))


def _pairs(left: EdgeScores, right: EdgeScores) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of each kind of score that both hold."""
    for field in fields(EdgeScores):
        both = getattr(left, field.name), getattr(right, field.name)
        if both[0] is not None and both[1] is not None:
            yield both


def _by_field(scores: Sequence[EdgeScores], combine: Callable[[list[Tensor]], Tensor]) -> EdgeScores:
    """Combines the tensors of each kind of score; a kind that none has stays None."""
    tensors = {field.name: [getattr(one, field.name) for one in scores] for field in fields(EdgeScores)}
    return EdgeScores(**{name: None if parts[0] is None else combine(parts) for name, parts in tensors.items()})  # type: ignore[arg-type]
