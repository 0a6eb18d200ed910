"""Compute hidden states and score edges in a step, and carry a loss's gradient back to the scores.

A backward splits in two: the gradient of the loss with respect to the scores, and the model's vector-Jacobian product
with it. `joined_leaves`, `split_gradients` and `vector_product` handle the tensors in between.

    N tokens
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from treering.arrays import Int64Array
from treering.attention import TreeLayout
from treering.attention.layout import to_device
from treering.model.divergence import Divergence, divergence_rows
from treering.model.edges import (
    EdgeScores,
    EdgeTable,
    LossOf,
    on_kernels,
    score_edges,
    scored_on_head,
    takes_kernels,
)
from treering.model.forward import hidden_states
from treering.model.logits import EntropyOf
from treering.model.teacher import TargetRows
from treering.model.three_pass import ThreePassLoss
from treering.model.tree_model import TreeModel
from treering.train.router_losses import Routing
from treering.tree.forest import Forest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scorer:
    """Model and options that every forward of a step shares.

    Attributes:
        model: the model.
        temperature: divides the logits.
        entropy_of: "all" if the objective reads entropies.
        value_head: maps hidden states to values, if the objective reads values.
        reads_logprobs: False leaves log-probs and entropies at 0.
        divergence: divergence from the teacher, if the objective reads it.
        targets: the teacher's distributions for the unit being scored; None if none of its edges is scored.
        routing: router losses of the step; None without them.
    """

    model: TreeModel
    temperature: float = 1.0
    entropy_of: EntropyOf = "none"
    value_head: nn.Module | None = None
    reads_logprobs: bool = True
    divergence: Divergence | None = None
    targets: TargetRows | None = None
    routing: Routing | None = None

    @property
    def device(self) -> torch.device:
        """Device that the model computes on."""
        return self.model.device

    def forward(
        self,
        forest: Forest,
        branches: Int64Array | None = None,
        layout: TreeLayout | None = None,
        positions: NDArray[np.integer[Any]] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states [N, C], and with gradients the router loss; `branches` [N] counts branches per token."""
        if self.routing is None:
            return hidden_states(self.model, forest, layout, positions), None
        assert branches is not None
        return self.routing.forward(lambda: hidden_states(self.model, forest, layout, positions), branches)

    def no_scores(self, num_edges: int) -> EdgeScores:
        """Return zeros in the format of `scores`."""
        weight = next(self.model.embedding.parameters())
        dtype = torch.promote_types(weight.dtype, torch.float32)
        logprobs, entropy, values, divergence = torch.zeros(4, num_edges, dtype=dtype, device=self.device)
        return EdgeScores(
            logprobs=logprobs,
            entropy=entropy,
            values=None if self.value_head is None else values,
            divergence=None if self.divergence is None else divergence,
        )

    def scores(self, hidden: Tensor, forest: Forest, table: EdgeTable) -> EdgeScores:
        """Score the table's edges, whose tokens are those of `forest`."""
        return scored_on_head(self.model, lambda head, rows: self._scores(head, rows, forest, table), hidden)

    def loss(self, hidden: Tensor, forest: Forest, table: EdgeTable, loss_of: LossOf) -> Tensor:
        """Return the sum of `loss_of` over all edges of the table, in parts where that computes logits only once."""
        model, shards = self.model, self.model.shards
        reads_more = self.value_head is not None or self.divergence is not None or not self.reads_logprobs
        is_whole = table.edges.size > 0 and not reads_more
        own_head = model.head if shards is None else shards.head
        if not (is_whole and takes_kernels(own_head, hidden, model.softcap)):
            return loss_of(slice(0, table.edges.size), self.scores(hidden, forest, table))
        temperature = self.temperature * model.logit_divisor

        def of_part(at: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
            return loss_of(at, EdgeScores(logprobs=logprobs, entropy=entropy))

        def on_head(head: nn.Module, hidden: Tensor) -> Tensor:
            assert isinstance(head, nn.Linear)
            rows = hidden[to_device(table.rows, hidden.device)]
            targets = to_device(table.targets, hidden.device)
            total: Tensor = on_kernels(
                ThreePassLoss, rows, head, targets, table.edge_row, temperature, self.entropy_of, of_part
            )
            return total

        total: Tensor = on_head(own_head, hidden) if shards is None else shards.on_head(on_head, hidden)
        return total

    def zero(self, hidden: Tensor) -> Tensor:
        """Return 0 with gradients of 0 for the weights that ranks must reduce although they score nothing."""
        return 0.0 * hidden[0, 0] if self.model.shards is None else self.model.shards.zero(hidden)

    def _scores(self, head: nn.Module, hidden: Tensor, forest: Forest, table: EdgeTable) -> EdgeScores:
        scores = self.no_scores(table.edges.size)
        if self.reads_logprobs:
            scores = score_edges(
                self.model,
                hidden,
                head,
                temperature=self.temperature,
                table=table,
                entropy_of=self.entropy_of,
                value_head=self.value_head,
            )
        if self.divergence is None or self.targets is None or table.edges.size == 0:
            return scores
        by_row = divergence_rows(
            hidden[to_device(table.rows, hidden.device)],
            head,
            self.targets.of(forest, table),
            self.divergence,
            vocab_size=self.model.num_logits,
            softcap=self.model.softcap,
            logit_divisor=self.model.logit_divisor,
        )
        return replace(scores, divergence=by_row[to_device(table.edge_row, hidden.device)])


def put_scores(everywhere: EdgeScores, scores: EdgeScores, table: EdgeTable) -> None:
    """Write the scores of a table's edges, without gradients, to their packed indices in `everywhere` [N]."""
    at = to_device(table.edges, everywhere.logprobs.device)
    for target, part in _pairs(everywhere, scores):
        target.index_copy_(0, at, part.detach().to(target.dtype))


def joined_leaves(scores: Sequence[EdgeScores]) -> EdgeScores:
    """Join the scores of several forests, as leaves that take gradients."""
    return _by_field(scores, lambda tensors: torch.cat(tensors).requires_grad_())


def split_gradients(leaves: EdgeScores, sizes: Sequence[int]) -> list[EdgeScores]:
    """Split the leaves' gradients into forests of the given sizes; a leaf without a gradient gives zeros."""
    ends = np.cumsum(sizes).tolist()

    def part(leaf: Tensor, number: int) -> Tensor:
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        return gradient[ends[number] - sizes[number] : ends[number]]

    return [
        _by_field([leaves], lambda tensors, number=number: part(tensors[0], number))  # type: ignore[misc]
        for number in range(len(sizes))
    ]


def vector_product(scores: EdgeScores, vectors: EdgeScores, edges: Int64Array) -> Tensor:
    """Return a scalar whose gradient with respect to the scores is the vectors at `edges`, packed indices."""
    at = to_device(edges, scores.logprobs.device)
    products = [(score * vector[at]).sum() for score, vector in _pairs(scores, vectors) if score.requires_grad]
    return sum(products, start=scores.logprobs.new_zeros(()))


def _pairs(left: EdgeScores, right: EdgeScores) -> Iterator[tuple[Tensor, Tensor]]:
    for field in fields(EdgeScores):
        both = getattr(left, field.name), getattr(right, field.name)
        if both[0] is not None and both[1] is not None:
            yield both


def _by_field(scores: Sequence[EdgeScores], combine: Callable[[list[Tensor]], Tensor]) -> EdgeScores:
    """Combine the tensors of each kind of score; a kind that no item has stays None."""
    tensors = {field.name: [getattr(one, field.name) for one in scores] for field in fields(EdgeScores)}
    return EdgeScores(**{name: None if parts[0] is None else combine(parts) for name, parts in tensors.items()})  # type: ignore[arg-type]
