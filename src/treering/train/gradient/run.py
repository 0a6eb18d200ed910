"""Run one step: the forward and backward of each micro-batch and each partitioned tree of a plan, in order.

Units that hold only part of a branch or pair are scored first without gradients; so is everything if the routers' load
must be known before a backward. The loss and metric sums of the step are collected here.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from treering.arrays import Int64Array
from treering.model.edges import EdgeScores, EdgeTable, LossOf, edge_table
from treering.model.forward import ONE_TOKEN, hidden_states
from treering.model.routers import Routes
from treering.train.gradient.activations import (
    ParentsChoice,
    ParentsOption,
    bytes_per_token,
    fastest_parents,
    free_memory,
)
from treering.train.gradient.edge_vectors import joined_leaves, split_gradients, vector_product
from treering.train.gradient.evaluation import LossTotals, evaluate
from treering.train.gradient.flat_batch import FlatBatch, Selection
from treering.train.gradient.partitioned import PartitionedStep, score_unit
from treering.train.gradient.passes import Unit, crossing_units, num_forwards, units_of
from treering.train.gradient.router_losses import Routing, branches_through, recorded_by
from treering.train.gradient.scoring import Scorer
from treering.train.gradient.teacher import StepTeacher
from treering.train.objectives import Objective
from treering.train.progress import OnProgress, PhaseProgress
from treering.tree.forest import Forest
from treering.tree.plan.partition import PartitionedTree
from treering.tree.plan.plan import MicroBatch, Plan


class StepRun:
    """Forward and backward of everything in a plan.

    Attributes:
        totals: loss and metrics so far.
        parents: what is done with parents' activations; None if no tree is partitioned.
        num_recomputed_tokens: see `BackwardResult`, also for the next two.
        num_scoring_tokens: tokens of the pass without gradients.
        scoring_s: seconds of that pass.
    """

    def __init__(
        self,
        plan: Plan,
        objective: Objective,
        batch: FlatBatch,
        scorer: Scorer,
        *,
        parents: ParentsOption,
        min_passes: int,
        routing: Routing | None = None,
        teacher: StepTeacher | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """`scorer` and `routing` belong to the model; the caller must be inside `tree_attention`, also of the teacher.

        Ranks in step run `min_passes` at least, and then every unit, trained or not; others have 0.
        """
        self._teacher = teacher
        self._min_passes = min_passes
        self._routing = routing
        self._num_passes = 0
        self._on_progress = on_progress
        self._progress = PhaseProgress("training", 0, None)
        self.totals = LossTotals()
        self.num_recomputed_tokens = 0
        self.num_scoring_tokens = 0
        self.scoring_s = 0.0
        self._objective = objective
        self._batch = batch
        self._scorer = scorer
        self._units = units_of(plan)
        self._selected = [batch.select(unit.forest, unit.branches) for unit in self._units]
        self.parents = self._choose(plan, parents) if plan.partitioned else None

    def backward(self) -> None:
        """Adds all gradients to `.grad`."""
        crossing = crossing_units(self._units, self._objective)
        load_first = self._load_first()
        scored = crossing if load_first is None else range(len(self._units))
        self._progress = PhaseProgress("scoring", self._num_tokens(scored), self._on_progress)
        vectors = self._vectors(crossing, load_first)
        if load_first is not None:
            self._find_load(load_first, already=crossing)
        self._progress = PhaseProgress("training", self._num_tokens(range(len(self._units))), self._on_progress)
        num_done = 0
        for number, unit in enumerate(self._units):
            if isinstance(unit, MicroBatch):
                self._run_whole(unit, self._selected[number], vectors.get(number))
            else:
                self._run_partitioned(unit, self._selected[number], vectors.get(number))
            num_done += unit.forest.num_tokens
            self._progress.reach(num_done)
        for _ in range(self._num_passes, self._min_passes):
            self._run_nothing()

    def _num_tokens(self, numbers: Iterable[int]) -> int:
        return sum(self._units[i].forest.num_tokens for i in numbers)

    def _run_whole(self, unit: MicroBatch, selected: Selection, vectors: EdgeScores | None) -> None:
        if selected.entries.size == 0:
            self._evaluate_nothing(selected, vectors)
        if unit.forest.num_tokens == 0 or (selected.entries.size == 0 and self._routing is None):
            if self._min_passes:
                self._run_nothing()
            return
        self._num_passes += 1
        scorer = self._scorer_of(unit, selected)
        with recorded_by(self._routing) as routes:
            hidden = hidden_states(scorer.parts, unit.forest)
        losses = [self._loss_of_hidden(hidden, unit.forest, selected, vectors, scorer)] if selected.entries.size else []
        if self._routing is not None:
            losses.append(_router_loss(self._routing, routes, unit.forest).to(hidden.device))
        if not selected.entries.size and self._min_passes:
            losses.append(scorer.zero(hidden))
        loss = sum(losses[1:], start=losses[0])
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]

    def _loss_of_hidden(
        self, hidden: Tensor, forest: Forest, selected: Selection, vectors: EdgeScores | None, scorer: Scorer
    ) -> Tensor:
        table = edge_table(forest, selected.wanted(forest))
        loss_of = self._loss_of(table, table.places(forest)[selected.edges], selected, vectors)
        if vectors is None and self._objective.scope != "entry":
            return loss_of(slice(0, table.edges.size), scorer.scores(hidden, forest, table))
        return scorer.loss(hidden, forest, table, loss_of)

    def _loss_of(self, table: EdgeTable, places: Int64Array, selected: Selection, vectors: EdgeScores | None) -> LossOf:
        """The loss of some edges of a table, in which `places` [E] are those of the selected entries' edges."""

        def loss_of(at: slice, scores: EdgeScores) -> Tensor:
            if vectors is not None:
                return vector_product(scores, vectors, table.edges[at])
            inside = (places >= at.start) & (places < at.stop)
            return self._loss(scores, places[inside] - at.start, selected.only(inside))

        return loss_of

    def _scorer_of(self, unit: Unit, selected: Selection) -> Scorer:
        """The scorer with the teacher's distributions of a unit, which live as long as the unit runs."""
        if self._teacher is None or selected.entries.size == 0:
            return self._scorer
        return replace(self._scorer, targets=self._teacher.targets(unit, selected))

    def _evaluate_nothing(self, selected: Selection, vectors: EdgeScores | None) -> None:
        """Pairs of branches without a trained token have a loss, but no gradient."""
        if self._objective.scope == "pair" and vectors is None:
            none = self._scorer.no_scores(0)
            self._loss(none, np.zeros(0, np.int64), selected)

    def _run_nothing(self) -> None:
        """A forward and backward of one token that adds zeros, so that a rank without work stays in step."""
        self._num_passes += 1
        nothing = self._scorer.zero(hidden_states(self._scorer.parts, ONE_TOKEN))
        if nothing.requires_grad:
            nothing.backward()  # type: ignore[no-untyped-call]

    def _run_partitioned(self, unit: PartitionedTree, selected: Selection, vectors: EdgeScores | None) -> None:
        assert self.parents is not None
        wanted = selected.wanted(unit.forest)
        scorer = self._scorer_of(unit, selected)
        step = PartitionedStep(unit, wanted, scorer, self.parents.parents, self._routing, progress=self._progress)
        parts = selected.split(step.owner_of_edge[selected.edges], len(unit.partitions))

        def loss_of(number: int, table: EdgeTable) -> LossOf:
            own = parts[number]
            return self._loss_of(table, step.place_of_edge[own.edges], own, vectors)

        step.backward(loss_of)
        self._num_passes += step.num_passes
        self.num_recomputed_tokens += step.num_recomputed

    def _loss(self, scores: EdgeScores, places: Int64Array, selected: Selection) -> Tensor:
        """The loss of some entries, added to the totals."""
        evaluation = evaluate(self._objective, self._batch, scores, places, selected)
        self.totals.add(evaluation)
        return evaluation.loss

    def _load_first(self) -> Routing | None:
        """The routing, if its load needs a separate pass: with several forwards, or several ranks."""
        if self._routing is None or self._routing.losses.balance == 0:
            return None
        is_cut = any(isinstance(unit, PartitionedTree) for unit in self._units)
        is_one_forward = not is_cut and sum(map(num_forwards, self._units)) == 1
        return None if is_one_forward and self._min_passes == 0 else self._routing

    def _find_load(self, routing: Routing, already: Sequence[int]) -> None:
        """Counts the routes of all units except `already`, in a pass without gradients, and sums over ranks."""
        started = time.perf_counter()
        for number, unit in enumerate(self._units):
            if number not in already and num_forwards(unit) > 0:
                self._score(unit, self._selected[number].only(np.zeros(0, np.int64)), routing)
        num_passes = sum(num_forwards(unit) for unit in self._units)
        with torch.no_grad():
            for _ in range(num_passes, self._min_passes):
                self._scorer.zero(hidden_states(self._scorer.parts, ONE_TOKEN))
        routing.share_load()
        self.scoring_s += time.perf_counter() - started

    def _vectors(self, numbers: Sequence[int], routing: Routing | None) -> dict[int, EdgeScores]:
        """The loss's gradient with respect to every score of the given units: [N] each, by unit.

        `routing` counts their routes in the same pass.
        """
        if not numbers:
            return {}
        started = time.perf_counter()
        units = [self._units[i] for i in numbers]
        scores = [self._score(unit, self._selected[i], routing) for i, unit in zip(numbers, units, strict=True)]
        leaves = joined_leaves(scores)
        sizes = [unit.forest.num_tokens for unit in units]
        selected = Selection.joined([self._selected[i] for i in numbers], sizes)
        loss = self._loss(leaves, selected.edges, selected)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        self.scoring_s += time.perf_counter() - started
        return dict(zip(numbers, split_gradients(leaves, sizes), strict=True))

    def _score(self, unit: Unit, selected: Selection, routing: Routing | None) -> EdgeScores:
        scores = score_unit(
            unit,
            selected.wanted(unit.forest),
            self._scorer_of(unit, selected),
            routing,
            progress=self._progress,
        )
        self.num_scoring_tokens += unit.forest.num_tokens
        self._progress.reach(self.num_scoring_tokens)
        return scores

    def _choose(self, plan: Plan, parents: ParentsOption) -> ParentsChoice:
        if parents != "auto":
            return ParentsChoice(parents=parents, reason="as requested")
        free, free_host = free_memory(self._scorer.device)
        return fastest_parents(
            chain_tokens=max(tree.chain_tokens for tree in plan.partitioned),
            bytes_per_token=bytes_per_token(self._scorer.parts),
            free_bytes=free,
            free_host_bytes=free_host,
        )


def _router_loss(routing: Routing, routes: Sequence[Routes], forest: Forest) -> Tensor:
    """The router loss of a micro-batch; if it is the whole batch, it also provides the load."""
    branches = branches_through(forest)
    if routing.losses.balance and not routing.has_load:
        routing.count(routes, branches)
        routing.share_load()
    return routing.loss(routes, branches)
