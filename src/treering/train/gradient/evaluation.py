"""Evaluate an objective on the scores of some edges: their loss, and sums of the objective's metrics."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treering.arrays import Float64Array, Int64Array
from treering.attention.to_device import to_device
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


class LossTotals:
    """Sums over all evaluations so far, read from the device once, at the end of a step."""

    def __init__(self) -> None:
        """Begins with zeros."""
        self._losses: list[Tensor] = []
        self._metrics: dict[str, list[Tensor]] = {}

    def add(self, evaluation: Evaluation) -> None:
        """Adds one evaluation, without waiting for it."""
        self._losses.append(evaluation.loss.detach())
        for name, value in evaluation.metric_sums.items():
            self._metrics.setdefault(name, []).append(value.detach())

    @property
    def loss(self) -> float:
        """The sum of the losses."""
        return _sum(self._losses)

    def averages(self, count: float) -> dict[str, float]:
        """Each metric's sum over the number of entries or pairs."""
        return {name: _sum(values) / max(count, 1e-300) for name, values in self._metrics.items()}


def _sum(scalars: Sequence[Tensor]) -> float:
    """In float64 and in order, with one transfer."""
    return sum(torch.stack([one.double() for one in scalars]).tolist()) if scalars else 0.0


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
    at = to_device(places, scores.logprobs.device)
    logprobs = scores.logprobs[at]

    def on_entries(values: Float64Array) -> Tensor:
        return to_device(values[selected.entries], logprobs.device).to(logprobs.dtype)

    values = None if scores.values is None else scores.values[at].to(logprobs.dtype)
    terms = objective.terms(
        Entries(
            logprobs=logprobs,
            values={name: on_entries(array) for name, array in batch.values.items()},
            branch=to_device(selected.branch, logprobs.device),
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
    place = np.full(batch.branch_tree.size, -1, np.int64)
    place[branches] = np.arange(branches.size)
    local = place[batch.pairs]
    return to_device(local[(local >= 0).all(1)], device)
