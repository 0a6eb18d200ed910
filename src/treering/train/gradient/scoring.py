"""Score hidden states: the model parts and options that every forward of a step shares."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from treering.model.edges import EdgeScores, EdgeTable, score_edges
from treering.model.families import ModelParts
from treering.model.logits import EntropyOf
from treering.tree.forest import Forest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scorer:
    """Turns hidden states into scores of edges.

    Attributes:
        parts: of the model.
        temperature: divides the logits.
        entropy_of: "all" if the objective reads entropies.
        value_head: hidden state to value, if the objective reads values.
    """

    parts: ModelParts
    temperature: float
    entropy_of: EntropyOf
    value_head: nn.Module | None

    @property
    def device(self) -> torch.device:
        """Device of the model's embedding."""
        return next(self.parts.embedding.parameters()).device

    def no_scores(self, num_edges: int) -> EdgeScores:
        """Zeros in the format of `scores`."""
        weight = next(self.parts.embedding.parameters())
        dtype = torch.promote_types(weight.dtype, torch.float32)
        logprobs, entropy, values = torch.zeros(3, num_edges, dtype=dtype, device=self.device)
        return EdgeScores(logprobs=logprobs, entropy=entropy, values=None if self.value_head is None else values)

    def scores(self, hidden: Tensor, forest: Forest, table: EdgeTable) -> EdgeScores:
        """Scores of the table's edges, whose tokens are those of `forest`."""
        return score_edges(
            hidden,
            self.parts.head,
            forest,
            temperature=self.temperature * self.parts.logit_divisor,
            vocab_size=self.parts.vocab_size,
            table=table,
            entropy_of=self.entropy_of,
            value_head=self.value_head,
            softcap=self.parts.softcap,
        )
