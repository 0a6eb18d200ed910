"""Score hidden states: the model parts and options that every forward of a step shares."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from treering.attention.to_device import to_device
from treering.model.distillation.divergence import Divergence
from treering.model.distillation.divergence_rows import divergence_rows
from treering.model.edges import EdgeScores, EdgeTable, LossOf, loss_on_kernels, score_edges, scored_on_head
from treering.model.families import ModelParts
from treering.model.logits import EntropyOf
from treering.model.scoring import takes_kernels
from treering.train.gradient.targets import TargetRows
from treering.tree.forest import Forest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scorer:
    """Turns hidden states into scores of edges.

    Attributes:
        parts: of the model.
        temperature: divides the logits.
        entropy_of: "all" if the objective reads entropies.
        value_head: hidden state to value, if the objective reads values.
        reads_logprobs: False leaves log-probs and entropies at 0.
        divergence: from the teacher, if the objective reads it.
        targets: the teacher's distributions of the unit that is scored; None where no edge of it is.
    """

    parts: ModelParts
    temperature: float
    entropy_of: EntropyOf
    value_head: nn.Module | None
    reads_logprobs: bool = True
    divergence: Divergence | None = None
    targets: TargetRows | None = None

    @property
    def device(self) -> torch.device:
        """Device that the model computes on."""
        return self.parts.device

    def no_scores(self, num_edges: int) -> EdgeScores:
        """Zeros in the format of `scores`."""
        weight = next(self.parts.embedding.parameters())
        dtype = torch.promote_types(weight.dtype, torch.float32)
        logprobs, entropy, values, divergence = torch.zeros(4, num_edges, dtype=dtype, device=self.device)
        return EdgeScores(
            logprobs=logprobs,
            entropy=entropy,
            values=None if self.value_head is None else values,
            divergence=None if self.divergence is None else divergence,
        )

    def scores(self, hidden: Tensor, forest: Forest, table: EdgeTable) -> EdgeScores:
        """Scores of the table's edges, whose tokens are those of `forest`."""
        return scored_on_head(self.parts, lambda head, rows: self._scores(head, rows, forest, table), hidden)

    def loss(self, hidden: Tensor, forest: Forest, table: EdgeTable, loss_of: LossOf) -> Tensor:
        """The sum of `loss_of` over all edges of the table, in parts of it where that computes logits only once."""
        parts, head = self.parts, self.parts.head
        reads_more = self.value_head is not None or self.divergence is not None or not self.reads_logprobs
        is_whole = parts.shards is None and table.edges.size > 0 and not reads_more
        if not (is_whole and takes_kernels(head, hidden, parts.softcap)):
            return loss_of(slice(0, table.edges.size), self.scores(hidden, forest, table))
        return loss_on_kernels(
            parts,
            hidden,
            head,
            forest,
            loss_of,
            temperature=self.temperature,
            table=table,
            entropy_of=self.entropy_of,
        )

    def zero(self, hidden: Tensor) -> Tensor:
        """0 with gradients of 0 for the weights that ranks must reduce although they score nothing."""
        return 0.0 * hidden[0, 0] if self.parts.shards is None else self.parts.shards.zero(hidden)

    def _scores(self, head: nn.Module, hidden: Tensor, forest: Forest, table: EdgeTable) -> EdgeScores:
        own = self._own_scores
        scores = own(head, hidden, forest, table) if self.reads_logprobs else self.no_scores(table.edges.size)
        if self.divergence is None or self.targets is None or table.edges.size == 0:
            return scores
        by_row = divergence_rows(
            hidden[to_device(table.rows, hidden.device)],
            head,
            self.targets.of(forest, table),
            self.divergence,
            vocab_size=self.parts.num_logits,
            softcap=self.parts.softcap,
            logit_divisor=self.parts.logit_divisor,
        )
        return replace(scores, divergence=by_row[to_device(table.edge_row, hidden.device)])

    def _own_scores(self, head: nn.Module, hidden: Tensor, forest: Forest, table: EdgeTable) -> EdgeScores:
        return score_edges(
            self.parts,
            hidden,
            head,
            forest,
            temperature=self.temperature,
            table=table,
            entropy_of=self.entropy_of,
            value_head=self.value_head,
        )
