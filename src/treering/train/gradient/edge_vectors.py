"""Convert between scores of a table's edges and vectors over a forest, and apply a loss's gradient to them.

Any backward splits in two: the gradient of the loss with respect to the scores, and the model's vector-Jacobian product
with it. This file holds the tensors in between.

    N tokens
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from treering.model.edges import EdgeScores, EdgeTable


def put_scores(everywhere: EdgeScores, scores: EdgeScores, table: EdgeTable) -> None:
    """Writes the scores of a table's edges, without gradients, to their packed indices in `everywhere` [N]."""
    at = torch.from_numpy(table.edges).to(everywhere.logprobs.device)
    for target, part in (
        (everywhere.logprobs, scores.logprobs),
        (everywhere.entropy, scores.entropy),
        (everywhere.values, scores.values),
    ):
        if target is not None and part is not None:
            target.index_copy_(0, at, part.detach().to(target.dtype))


def joined_leaves(scores: Sequence[EdgeScores]) -> EdgeScores:
    """Scores of several forests one after another, as leaves that take gradients."""

    def leaf(tensors: list[Tensor]) -> Tensor:
        return torch.cat(tensors).requires_grad_()

    values = [part.values for part in scores if part.values is not None]
    return EdgeScores(
        logprobs=leaf([part.logprobs for part in scores]),
        entropy=leaf([part.entropy for part in scores]),
        values=leaf(values) if values else None,
    )


def split_gradients(leaves: EdgeScores, sizes: Sequence[int]) -> list[EdgeScores]:
    """The leaves' gradients split into forests of these sizes; zeros if a leaf has no gradient."""

    def parts(leaf: Tensor) -> tuple[Tensor, ...]:
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        return torch.split(gradient, list(sizes))

    values = [None] * len(sizes) if leaves.values is None else parts(leaves.values)
    return [
        EdgeScores(logprobs=logprobs, entropy=entropy, values=value)
        for logprobs, entropy, value in zip(parts(leaves.logprobs), parts(leaves.entropy), values, strict=True)
    ]


def vector_product(scores: EdgeScores, vectors: EdgeScores, table: EdgeTable) -> Tensor:
    """A scalar whose gradient with respect to the scores is the vectors at the table's edges."""
    at = torch.from_numpy(table.edges).to(scores.logprobs.device)
    product = (scores.logprobs * vectors.logprobs[at]).sum()
    if scores.entropy.requires_grad:
        product = product + (scores.entropy * vectors.entropy[at]).sum()
    if scores.values is not None and vectors.values is not None:
        product = product + (scores.values * vectors.values[at]).sum()
    return product
