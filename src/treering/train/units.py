"""The run of one step: each micro-batch and each partitioned tree of a plan forward and backward, in order.

Knows which of them must know the objective's gradient before their own forward: those that hold a branch or a pair
only in part. Owns the sums that a step reports.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.model.edges import EdgeScores, EdgeTable, edge_table
from treering.model.forward import hidden_states
from treering.train.edge_vectors import joined_leaves, put_scores, split_gradients, vector_product
from treering.train.evaluation import Totals, evaluate
from treering.train.flat_batch import FlatBatch, Selection
from treering.train.objectives import Objective
from treering.train.parents import Memory, ParentsChoice, ParentsOption, choose_parents, free_memory
from treering.train.partitioned import PartitionedStep
from treering.train.saved_tensors import saved_bytes
from treering.train.scoring import Scorer
from treering.tree.forest import Forest
from treering.tree.partition import PartitionedTree
from treering.tree.plan import MicroBatch, Plan

Int64Array = NDArray[np.int64]
Unit = MicroBatch | PartitionedTree

PROBE_TOKENS = (16, 48)
"""Two lengths whose saved bytes tell what a token costs: the difference leaves out what does not grow."""


class StepRun:
    """Forward and backward of everything in a plan.

    Attributes:
        totals: loss and metrics so far.
        parents: what becomes of parents' activations; None if no tree is partitioned.
        num_recomputed_tokens: see `BackwardResult`, as are the next two.
        num_scoring_tokens: tokens of the pass without gradients.
        scoring_s: its seconds.
    """

    def __init__(
        self,
        plan: Plan,
        objective: Objective,
        batch: FlatBatch,
        scorer: Scorer,
        *,
        parents: ParentsOption,
        max_bytes: int | None,
        min_micro_batches: int,
    ) -> None:
        """`scorer` is that of the model; the caller is inside `tree_attention`."""
        self._min_passes = min_micro_batches
        self._num_passes = 0
        self.totals = Totals()
        self.num_recomputed_tokens = 0
        self.num_scoring_tokens = 0
        self.scoring_s = 0.0
        self._objective = objective
        self._batch = batch
        self._scorer = scorer
        self._units: list[Unit] = [*plan.micro_batches, *plan.partitioned]
        self._selected = [batch.select(unit.forest, unit.branches) for unit in self._units]
        self.parents = self._choose(plan, parents, max_bytes) if plan.partitioned else None

    def backward(self) -> None:
        """Adds all gradients to `.grad`."""
        crossing = self._crossing()
        vectors = self._vectors(crossing)
        for number, unit in enumerate(self._units):
            if isinstance(unit, MicroBatch):
                self._run_whole(unit, self._selected[number], vectors.get(number))
            else:
                self._run_partitioned(unit, self._selected[number], vectors.get(number))
        for _ in range(self._num_passes, self._min_passes):
            self._run_nothing()

    def _run_whole(self, unit: MicroBatch, selected: Selection, vectors: EdgeScores | None) -> None:
        if selected.entries.size == 0:
            return self._evaluate_nothing(selected, vectors)
        self._num_passes += 1
        table = edge_table(unit.forest, _wanted(unit.forest, selected))
        hidden = hidden_states(self._scorer.parts, unit.forest)
        scores = self._scorer.scores(hidden, unit.forest, table)
        if vectors is None:
            places = _places(table, unit.forest.num_tokens)[selected.edges]
            loss = self._loss(scores, places, selected)
        else:
            loss = vector_product(scores, vectors, table)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]

    def _evaluate_nothing(self, selected: Selection, vectors: EdgeScores | None) -> None:
        """Pairs of branches without a trained token have a loss, if no gradient."""
        if self._objective.scope == "pair" and vectors is None:
            none = self._scorer.no_scores(0)
            self._loss(none, np.zeros(0, np.int64), selected)

    def _run_nothing(self) -> None:
        """A forward and backward of one token that adds zeros: what a rank without work owes the others."""
        hidden = hidden_states(self._scorer.parts, Forest.from_sequences([[0]]))
        if hidden.requires_grad:
            (0.0 * hidden[0, 0]).backward()  # type: ignore[no-untyped-call]

    def _run_partitioned(self, unit: PartitionedTree, selected: Selection, vectors: EdgeScores | None) -> None:
        assert self.parents is not None
        step = PartitionedStep(unit, _wanted(unit.forest, selected), self._scorer, self.parents.parents)
        parts = _split(selected, step.owner_of_edge[selected.edges], len(unit.partitions))

        def loss_of(number: int, table: EdgeTable, scores: EdgeScores) -> Tensor:
            if vectors is not None:
                return vector_product(scores, vectors, table)
            own = parts[number]
            places = step.place_of_edge[own.edges]
            return self._loss(scores, places, own)

        step.backward(loss_of)
        self._num_passes += step.num_passes
        self.num_recomputed_tokens += step.num_recomputed

    def _loss(self, scores: EdgeScores, places: Int64Array, selected: Selection) -> Tensor:
        """The loss of some entries, which the totals gain."""
        evaluation = evaluate(self._objective, self._batch, scores, places, selected)
        self.totals.add(evaluation)
        return evaluation.loss

    def _crossing(self) -> list[int]:
        """Units that hold a branch, or a pair, of which the objective needs more than is computed at one time."""
        if self._objective.scope == "entry":
            return []
        crossing = {i for i, unit in enumerate(self._units) if isinstance(unit, PartitionedTree)}
        if self._batch.pairs is not None:
            unit_of = np.full(self._batch.offsets.size - 1, -1, np.int64)
            for number, unit in enumerate(self._units):
                unit_of[unit.branches] = number
            sides = unit_of[self._batch.pairs]
            crossing |= set(sides[sides[:, 0] != sides[:, 1]].ravel().tolist())
            # A unit that shares a pair with a crossing one crosses too, and both sides of its own pairs are in it.
        return sorted(crossing)

    def _vectors(self, numbers: Sequence[int]) -> dict[int, EdgeScores]:
        """The loss's gradient with respect to every score of the given units: [N] each, by unit."""
        if not numbers:
            return {}
        started = time.perf_counter()
        units = [self._units[i] for i in numbers]
        scores = [self._score(unit, self._selected[i]) for i, unit in zip(numbers, units, strict=True)]
        leaves = joined_leaves(scores)
        sizes = [unit.forest.num_tokens for unit in units]
        selected = Selection.joined([self._selected[i] for i in numbers], sizes)
        loss = self._loss(leaves, selected.edges, selected)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        self.scoring_s += time.perf_counter() - started
        return dict(zip(numbers, split_gradients(leaves, sizes), strict=True))

    def _score(self, unit: Unit, selected: Selection) -> EdgeScores:
        self.num_scoring_tokens += unit.forest.num_tokens
        wanted = _wanted(unit.forest, selected)
        if isinstance(unit, PartitionedTree):
            return PartitionedStep(unit, wanted, self._scorer, "keep").score()
        table = edge_table(unit.forest, wanted)
        with torch.no_grad():
            scores = self._scorer.scores(hidden_states(self._scorer.parts, unit.forest), unit.forest, table)
        everywhere = self._scorer.no_scores(unit.forest.num_tokens)
        put_scores(everywhere, scores, table)
        return everywhere

    def _choose(self, plan: Plan, parents: ParentsOption, max_bytes: int | None) -> ParentsChoice:
        def measure() -> Memory:
            free, free_host = free_memory(self._scorer.device, max_bytes)
            return Memory(
                chain_tokens=max(tree.chain_tokens for tree in plan.partitioned),
                bytes_per_token=self._bytes_per_token(),
                free_bytes=free,
                free_host_bytes=free_host,
            )

        return choose_parents(parents, measure)

    def _bytes_per_token(self) -> float:
        parts = self._scorer.parts
        few, more = (
            saved_bytes(lambda n=n: hidden_states(parts, Forest.from_sequences([[0] * n])), parts)  # type: ignore[misc]
            for n in PROBE_TOKENS
        )
        return (more - few) / (PROBE_TOKENS[1] - PROBE_TOKENS[0])


def _wanted(forest: Forest, selected: Selection) -> NDArray[np.bool_]:
    wanted = np.zeros(forest.num_tokens, bool)
    wanted[selected.edges] = True
    return wanted


def _places(table: EdgeTable, num_tokens: int) -> Int64Array:
    """Where in the table's order each edge is: int64 [N]."""
    places = np.full(num_tokens, -1, np.int64)
    places[table.edges] = np.arange(table.edges.size)
    return places


def _split(selected: Selection, owner: Int64Array, num_owners: int) -> list[Selection]:
    """Selected entries by the partition that scores them."""
    order = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[order], np.arange(1, num_owners))
    return [selected.only(chosen) for chosen in np.split(order, bounds)]
