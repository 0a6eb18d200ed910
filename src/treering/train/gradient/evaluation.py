"""Evaluate an objective on the scores of some edges: their loss, and sums of the objective's metrics."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from treering.arrays import Float64Array, Int64Array
from treering.model.edges import EdgeScores
from treering.train.gradient.flat_batch import FlatBatch, Selection
from treering.train.objectives import Entries, Objective


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """The loss and metrics of some entries.

    Attributes:
        loss: scalar, differentiable.
        metric_sums: the objective's metrics, summed over the entries or pairs.
    """

    loss: Tensor
    metric_sums: dict[str, Tensor]


@dataclass(slots=True, kw_only=True)
class LossTotals:
    """Sums over all evaluations so far."""

    loss: float = 0.0
    metric_sums: dict[str, float] = field(default_factory=dict)

    def add(self, evaluation: Evaluation) -> None:
        """Adds one evaluation."""
        self.loss += float(evaluation.loss.detach())
        for name, value in evaluation.metric_sums.items():
            self.metric_sums[name] = self.metric_sums.get(name, 0.0) + float(value)

    def averages(self, count: float) -> dict[str, float]:
        """Each sum over the number of entries or pairs."""
        return {name: value / max(count, 1e-300) for name, value in self.metric_sums.items()}


def evaluate(
    objective: Objective, batch: FlatBatch, scores: EdgeScores, places: Int64Array, selected: Selection
) -> Evaluation:
    """The loss and metrics of some entries.

    Args:
        objective: the objective.
        batch: of the whole step.
        scores: of some edges.
        places: int64 [E], index in `scores` of each selected entry's edge.
        selected: E entries: whole branches if the objective's scope is "branch", whole pairs if it is "pair".
    """
    at = torch.from_numpy(places).to(scores.logprobs.device)
    logprobs = scores.logprobs[at]

    def on_entries(values: Float64Array) -> Tensor:
        return torch.from_numpy(values[selected.entries]).to(logprobs)

    values = None if scores.values is None else scores.values[at].to(logprobs.dtype)
    terms = objective.terms(
        Entries(
            logprobs=logprobs,
            values={name: on_entries(array) for name, array in batch.values.items()},
            branch=torch.from_numpy(selected.branch).to(logprobs.device),
            num_branches=selected.branches.size,
            entropy=scores.entropy[at] if "entropy" in objective.needs else None,
            state_values=values if "value" in objective.needs else None,
            divergence=None if scores.divergence is None else scores.divergence[at].to(logprobs.dtype),
            pairs=_local_pairs(batch, selected.branches, logprobs.device),
        )
    )
    if objective.scope == "pair":
        weights, counts = torch.full_like(terms.loss, batch.pair_weight), torch.ones_like(terms.loss)
    else:
        weights, counts = on_entries(batch.weights), on_entries(batch.counts)
    return Evaluation(
        loss=(weights * terms.loss).sum(),
        metric_sums={name: (counts * value).sum() for name, value in terms.metrics.items()},
    )


def _local_pairs(batch: FlatBatch, branches: Int64Array, device: torch.device) -> Tensor | None:
    """Pairs whose branches are both in `branches`, as indices into it."""
    if batch.pairs is None:
        return None
    place = np.full(batch.offsets.size - 1, -1, np.int64)
    place[branches] = np.arange(branches.size)
    local = place[batch.pairs]
    return torch.from_numpy(local[(local >= 0).all(1)]).to(device)
