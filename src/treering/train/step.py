"""The tree step: take one optimizer batch of forests, and add the exact gradients of its branches to `.grad`.

Log-probs are gathered along each branch, so a loss written for flat sequences works unchanged, and autograd's
scatter-add through the gather sums the gradients of shared tokens.

If an objective needs a whole branch or pair that does not fit into one forward, the step makes two passes. The first,
without gradients, gives the loss's gradient with respect to every log-prob; the second takes that gradient back through
the model.

`backward` checks its arguments, plans micro-batches and flattens entries; `_Passes` then runs the units of the plan.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from treering.arrays import Float64Array, Int64Array
from treering.attention.layout import to_device
from treering.errors import ConfigError, InputError, StateError, UnsupportedError
from treering.model.checks import check_no_hooks
from treering.model.context import is_active, tree_attention
from treering.model.edges import EdgeScores, EdgeTable, LossOf, edge_table
from treering.model.forward import FILLER, check_forest, check_temperature, hidden_states, with_features
from treering.model.routers import find_routers, router_hooks
from treering.model.three_pass import backward_of, begin_step
from treering.model.tree_model import TreeModel
from treering.ranks.gathering import gathered, reset, summed, whole_weights
from treering.ranks.group import agreeing
from treering.ranks.setup import RanksOption, StepRanks, ranks_of, without_ddp
from treering.ranks.units import units_of as sharded_units
from treering.train.entries import FlatBatch, Selection, flatten_batch, read_entries
from treering.train.memory import (
    DEFAULT_TOKENS,
    MaxTokens,
    ParentsChoice,
    choose_parents,
    fewest_on_ranks,
    run_by_memory,
    tokens_that_fit,
)
from treering.train.objective import Entries, Objective
from treering.train.partitioned import PartitionedStep, Unit, num_forwards, score_unit
from treering.train.progress import OnProgress, PhaseProgress
from treering.train.router_losses import RouterFactors, Routing, branches_through
from treering.train.scoring import Scorer, joined_leaves, split_gradients, vector_product
from treering.train.step_teacher import StepTeacher
from treering.tree.forest import Forest
from treering.tree.partition import PartitionedTree
from treering.tree.plan import MicroBatch, Plan, plan_batch

FILL_TOKENS = MappingProxyType({"cpu": 2048})
"""Tokens per micro-batch by device, used if `max_tokens` is larger. Smaller trees are combined up to this size, and
larger ones are cut to it if the cut needs no extra pass. On a CPU 2,048 tokens keep every core busy, and larger tensors
are allocated on fresh pages each time: steps with 8,192 tokens took 6 to 25 % longer (8 layers of 512)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BackwardResult:
    """Result of a tree step.

    Attributes:
        loss: the objective over the whole batch, or this rank's share of it if ranks share denominators, plus router
            losses.
        num_trained_tokens: trained entries, counted per branch; under `once` a shared token counts once.
        averages: the objective's metrics, averaged over trained entries (over pairs for dpo); with router losses also
            `router_balance`, `router_z` and `expert_load_max` over all ranks (see `Routing.metrics`).
        plan: the micro-batches and partitioned trees of the step.
        parents: whether partitions' activations were kept, and why; None if no tree was partitioned.
        num_recomputed_tokens: tokens whose forward ran twice because activations were not kept.
        num_scoring_tokens: tokens of the pass without gradients, which sequence-level objectives and balance losses may
            need.
        scoring_s: seconds of that pass.
    """

    loss: float
    num_trained_tokens: float
    averages: dict[str, float]
    plan: Plan
    parents: ParentsChoice | None = None
    num_recomputed_tokens: int = 0
    num_scoring_tokens: int = 0
    scoring_s: float = 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics to log: the averages, token counts, achieved `sharing`, `num_micro_batches`."""
        flat = self.plan.num_branch_tokens
        computed = self.plan.num_tokens + self.num_recomputed_tokens
        return {
            **self.averages,
            "num_trained_tokens": self.num_trained_tokens,
            "num_recomputed_tokens": float(self.num_recomputed_tokens),
            "num_scoring_tokens": float(self.num_scoring_tokens),
            "sharing": 1.0 - computed / flat if flat else 0.0,
            "num_micro_batches": float(self.plan.num_micro_batches),
        }


def backward(
    model: nn.Module | TreeModel,
    forests: Forest | Iterable[Forest],
    objective: Objective,
    max_tokens: MaxTokens = None,
    *,
    temperature: float = 1.0,
    value_head: nn.Module | None = None,
    backend: str = "auto",
    ranks: RanksOption | None = None,
    router_losses: RouterFactors | None = None,
    on_progress: OnProgress | None = None,
) -> BackwardResult:
    """Add the objective's gradients to `.grad`, equal to those of training every branch as a flat sequence.

    The call enters `tree_attention` for the model and a teacher, unless the caller has. Denominators cover the whole
    batch, so `max_tokens` changes memory and rounding, never the gradient. A tree larger than `max_tokens` runs in
    partitions; activations of partitions with children are kept if free memory allows, and recomputed otherwise.

    Args:
        model: a supported Hugging Face causal language model, a PEFT model of one, or the `TreeModel` of either; on
            several ranks, the model that was passed to `treering.ranks.prepare`.
        forests: the optimizer batch; on several ranks, this rank's share of it. Per-branch values of the objective
            follow the order of forests, then sequences.
        objective: an objective from `treering.objectives`.
        max_tokens: most distinct tokens per micro-batch and partition; fewer are used where that is faster
            (`FILL_TOKENS`). None runs everything at once. "auto" on CUDA divides free memory by measured bytes per
            token, and takes the minimum over ranks; a single rank halves it with a warning if memory still runs out.
            Elsewhere "auto" is 16,384.
        temperature: divides the logits, as at sampling time.
        value_head: maps hidden states [R, C] to values [R, 1], for objectives that train one; its gradients are added
            too.
        backend: attention backend; ignored inside `tree_attention`.
        ranks: how ranks of a prepared model keep step. "sharded": weights of `fully_shard` are gathered in every pass,
            and all ranks run the same passes, padded with empty ones. "gathered": weights stay gathered during the
            step, ranks run any passes, and gradients are reduced once at its end. None means "sharded" if weights are
            sharded, else "gathered". "alone": this rank trains a model by itself.
        router_losses: losses on the routers of a mixture of experts, added to the objective's; None adds none.
        on_progress: called after each micro-batch and partition with the tokens done and the total of this rank; does
            not change the result.

    Raises:
        InputError: per-branch values that do not fit the branches, a token outside the vocabulary, a missing or
            unneeded value head, a teacher with another vocabulary, or teacher scores that do not fit the branches. No
            gradient has been added.
        ConfigError: options that contradict each other.
        StateError: gradients are switched off, or no parameter requires one; several ranks run and the model is not
            prepared, or another rank runs different passes or rejects its inputs. After gradients have been added: an
            optimizer that steps within backward has changed weights between micro-batches or partitions.
        UnsupportedError: a model whose gradients would not be exact; router losses of a model without routers, or under
            reentrant gradient checkpointing.

        Any other error, such as running out of memory, may leave partial gradients: clear them before the next step.

    Example:
        >>> forest = Forest.from_sequences([[5, 6, 7], [5, 6, 8]])
        >>> result = backward(model, forest, sft())                # doctest: +SKIP
        >>> result.plan.num_tokens, result.metrics["sharing"]      # doctest: +SKIP
        (4, 0.333)
    """
    if not isinstance(forests, Iterable | Forest):
        raise InputError(f"expected a Forest or several, got {forests!r:.80}; make one with Forest.from_sequences")
    forests = [forests] if isinstance(forests, Forest) else list(forests)
    given = model if isinstance(model, TreeModel) else without_ddp(model)
    module = given.model if isinstance(given, TreeModel) else given
    team = ranks_of(module, ranks)

    def step(most: int | None) -> BackwardResult:
        # All checks come before the first gradient is added and before ranks communicate.
        with agreeing(team.group) as agreement:
            model = TreeModel.of(given)
            _check_inputs(model, forests, objective, temperature, value_head)
            teacher = None
            if objective.distillation is not None:
                teacher = StepTeacher(
                    objective.distillation, student=model, forests=forests, temperature=temperature, backend=backend
                )
            _check_router_losses(router_losses)
            routers = None if router_losses is None else find_routers(model)
            in_step = team.mode == "sharded"
            plan = plan_step(
                forests, objective, most, device=model.device, in_step=in_step, router_losses=router_losses
            )
            units = units_of(plan)
            entries = read_entries(forests, objective)
            if teacher is not None:
                teacher.check(units, entries)
            agreement.what = f"{objective.name} with ranks={team.mode!r} and router_losses={router_losses}"
            agreement.num_passes = _count_passes(plan, objective) if in_step else 0
        inside = nullcontext() if is_active(model) else tree_attention(model, backend)
        teaching = nullcontext() if teacher is None else teacher.active()
        reducing = _reduced_over_ranks(team, model, value_head)
        with inside, teaching, router_hooks(routers), _without_cast_cache(model.device), reducing as before_last:
            model = with_features(model, forests)
            batch = flatten_batch(entries, objective, team.group.sum)
            routing = None
            if router_losses is not None and routers is not None:
                routing = Routing(router_losses, routers, plan.num_branch_tokens, team.group.sum)
            passes = _Passes(
                objective=objective,
                batch=batch,
                scorer=Scorer(
                    parts=model,
                    temperature=temperature,
                    entropy_of="all" if "entropy" in objective.needs else "none",
                    value_head=value_head,
                    reads_logprobs=objective.reads_logprobs,
                    divergence=None if teacher is None else teacher.divergence,
                    routing=routing,
                ),
                units=units,
                selected=[batch.select(unit.forest, unit.branches) for unit in units],
                min_passes=agreement.num_passes,
                teacher=teacher,
                on_progress=on_progress,
                before_last=before_last if model.features is None else _nothing,
            )
            passes.run()
            if model.features is not None:
                model.features.backward()
        # Values on the device are read from here on.
        if routing is not None and not routing.has_load:
            routing.share_load()
        num_terms = batch.num_trained if objective.pairs is None else float(len(objective.pairs))
        averages = {name: _sum(values) / max(num_terms, 1e-300) for name, values in passes.metric_sums.items()}
        return BackwardResult(
            loss=_sum(passes.losses) + (0.0 if routing is None else routing.total),
            num_trained_tokens=batch.num_trained,
            averages=averages | ({} if routing is None else routing.metrics()),
            plan=replace(plan, ranks=team.mode),
            parents=passes.parents,
            num_recomputed_tokens=passes.num_recomputed_tokens,
            num_scoring_tokens=passes.num_scoring_tokens,
            scoring_s=passes.scoring_s,
        )

    if max_tokens != "auto":
        return step(max_tokens)
    weights = [*module.parameters(), *(() if value_head is None else value_head.parameters())]

    def first() -> int:
        bound = TreeModel.of(given)
        _check_router_losses(router_losses)
        routers = None if router_losses is None else find_routers(bound)
        inside = nullcontext() if is_active(bound) else tree_attention(bound, backend)
        # Compiled layers keep the hooks of their first forward.
        with inside, router_hooks(routers), _without_cast_cache(bound.device):
            return tokens_that_fit(bound, weights, team.mode)

    if team.group.size > 1:
        tokens = fewest_on_ranks(team.group, first)
        # Ranks that run the same passes cannot cut a tree, so an estimate that is too low for one gives way.
        largest = max((forest.num_tokens for forest in forests), default=0) if team.mode == "sharded" else 0
        return step(max(tokens, min(largest, DEFAULT_TOKENS)))
    return run_by_memory(TreeModel.of(given), weights, step, first)


def plan_step(
    forests: Sequence[Forest],
    objective: Objective,
    max_tokens: int | None,
    *,
    device: torch.device,
    in_step: bool = False,
    router_losses: RouterFactors | None = None,
) -> Plan:
    """Plan the step as `backward` does: `plan_batch` with the fastest number of tokens for the device.

    For ranks that run the same passes (`in_step`), only `max_tokens` counts, because none of their trees may be cut.
    The same holds for a batch with a balance loss that fits into one forward, because one forward needs no counting
    pass.

    Raises:
        InputError: see `plan_batch`.

    Example: under a budget of 16,384 a tree of 5,000 tokens becomes three partitions on CPU, but stays whole for gspo,
    whose partitions would need a pass without gradients.
    """
    fill_tokens = None if max_tokens is None or in_step else FILL_TOKENS.get(device.type)
    num_tokens = sum(forest.num_tokens for forest in forests)
    if router_losses is not None and router_losses.balance and num_tokens <= (max_tokens or 0):
        fill_tokens = None
    return plan_batch(
        forests,
        max_tokens,
        fill_tokens=fill_tokens,
        cut_tokens=fill_tokens if objective.scope == "entry" else None,
    )


def units_of(plan: Plan) -> list[Unit]:
    """Return the units in the order in which a step runs them: micro-batches, then partitioned trees."""
    return [*plan.micro_batches, *plan.partitioned]


def _check_inputs(
    model: TreeModel,
    forests: Sequence[Forest],
    objective: Objective,
    temperature: float,
    value_head: nn.Module | None,
) -> None:
    """Refuse inputs that a step cannot train exactly."""
    check_no_hooks(model)
    check_temperature(temperature)
    if value_head is not None and not isinstance(value_head, nn.Module):
        raise InputError(
            f"value_head must be a module, such as nn.Linear(hidden size, 1), got {type(value_head).__name__}"
        )
    hidden_size = model.config.hidden_size
    if isinstance(value_head, nn.Linear) and value_head.in_features != hidden_size:
        raise InputError(
            f"value_head must read hidden states of {hidden_size} numbers, got one that reads "
            f"{value_head.in_features}; use nn.Linear({hidden_size}, 1)"
        )
    for forest in forests:
        check_forest(forest, model)
    if not isinstance(objective, Objective):
        raise InputError(f"expected an objective, got {objective!r}; call one, such as treering.objectives.sft()")
    if ("value" in objective.needs) != (value_head is not None):
        raise InputError(
            f"a value head must be given if and only if the objective trains one; {objective.name} "
            + ("does: pass one" if value_head is None else "does not: set value_head=None, or pass returns to ppo")
        )
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise StateError("backward needs gradients, and they are switched off here; leave no_grad or inference_mode")
    heads = [] if value_head is None else [*value_head.parameters()]
    if not any(weight.requires_grad for weight in (*model.model.parameters(), *heads)):
        raise StateError("backward needs a parameter with requires_grad=True, and all are frozen; unfreeze some")


def _check_router_losses(router_losses: RouterFactors | None) -> None:
    if router_losses is not None and not isinstance(router_losses, RouterFactors):
        raise InputError(
            f"router_losses must be RouterLosses, such as RouterLosses(balance=0.001), got {router_losses!r}"
        )


def _count_passes(plan: Plan, objective: Objective) -> int:
    """Count the forwards with a backward of a rank in step with others; ranks with fewer add empty ones.

    Raises:
        ConfigError: a tree in partitions, or a sequence or pair that is not computed in one pass.
    """
    units = units_of(plan)
    if plan.partitioned or _crossing(units, objective):
        num_cut = len(plan.partitioned)
        raise ConfigError(
            f'ranks="sharded" needs whole trees and pairs, and max_tokens={plan.max_tokens} '
            f"{f'cuts {num_cut} of the trees' if num_cut else 'puts the branches of a pair into two micro-batches'}; "
            'set ranks="gathered", or raise max_tokens'
        )
    return len(units)


def _crossing(units: Sequence[Unit], objective: Objective) -> list[int]:
    """Return the indices of units that hold only part of a branch or pair that the objective needs whole."""
    if objective.scope == "entry":
        return []
    crossing = {i for i, unit in enumerate(units) if isinstance(unit, PartitionedTree)}
    if objective.pairs is not None:
        unit_of = np.full(sum(unit.branches.size for unit in units), -1, np.int64)
        for number, unit in enumerate(units):
            unit_of[unit.branches] = number
        sides = unit_of[objective.pairs]
        crossing |= set(sides[sides[:, 0] != sides[:, 1]].ravel().tolist())
        # A unit that shares a pair with a crossing unit crosses too; all other pairs lie within their unit.
    return sorted(crossing)


def _nothing() -> None:
    pass


def _check_unchanged(weights: Mapping[nn.Parameter, int]) -> None:
    """Refuse weights that differ from their versions at the start, since passes share a step."""
    if any(weight._version != version for weight, version in weights.items()):
        raise StateError(
            "a step in several micro-batches or partitions needs the same weights in all, and a hook has changed "
            "some within backward, as optimizers that step there do: this step is wrong; start again without the "
            "hook, or with max_tokens=None"
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _Passes:
    """Forwards and backwards of a step, with the sums of their losses and metrics.

    Attributes:
        objective: objective of the step.
        batch: all entries of the step.
        scorer: scores tokens with the model; the caller has entered `tree_attention` for it and for the teacher.
        units: micro-batches and partitioned trees, in order.
        selected: the trained entries of each unit.
        min_passes: number of passes to reach with empty ones, for ranks that run the same passes; else 0. If positive,
            a unit without trained entries runs an empty pass too.
        teacher: teacher of a distillation.
        on_progress: see `backward`.
        before_last: called before the last backward, unless empty passes may follow it.
    """

    objective: Objective
    batch: FlatBatch
    scorer: Scorer
    units: Sequence[Unit]
    selected: Sequence[Selection]
    min_passes: int
    teacher: StepTeacher | None
    on_progress: OnProgress | None
    before_last: Callable[[], None]
    parents: ParentsChoice | None = None
    losses: list[Tensor] = field(default_factory=list)
    metric_sums: dict[str, list[Tensor]] = field(default_factory=dict)
    num_recomputed_tokens: int = 0
    num_scoring_tokens: int = 0
    scoring_s: float = 0.0
    _num_passes: int = 0
    _progress: PhaseProgress = field(default_factory=lambda: PhaseProgress("training", 0, None))

    def run(self) -> None:
        """Add all gradients to `.grad`."""
        chains = [unit.chain_tokens for unit in self.units if isinstance(unit, PartitionedTree)]
        if chains:
            self.parents = choose_parents(self.scorer.parts, chain_tokens=max(chains))
        begin_step()
        weights = {one: one._version for one in self.scorer.parts.model.parameters() if one.requires_grad}
        vectors = self._score_first()
        self._begin("training", range(len(self.units)))
        num_done = 0
        for number, unit in enumerate(self.units):
            is_last = number == len(self.units) - 1 and not self.min_passes
            before_last = self.before_last if is_last else _nothing
            if isinstance(unit, MicroBatch):
                before_last()
                self._run_whole(unit, self.selected[number], vectors.get(number))
            else:
                self._run_partitioned(unit, self.selected[number], vectors.get(number), before_last)
            num_done += unit.forest.num_tokens
            self._progress.reach(num_done)
            if number + 1 < len(self.units) or isinstance(unit, PartitionedTree):
                _check_unchanged(weights)
        for _ in range(self._num_passes, self.min_passes):
            self._run_nothing()

    def _begin(self, phase: Literal["scoring", "training"], numbers: Iterable[int]) -> None:
        num_tokens = sum(self.units[i].forest.num_tokens for i in numbers)
        self._progress = PhaseProgress(phase, num_tokens, self.on_progress)

    def _score_first(self) -> dict[int, EdgeScores]:
        """Run the passes without gradients whose results the backwards need.

        A balance loss needs the routers' load over all units before the first backward.

        Returns:
            By unit, for units that hold only part of a branch or pair: the loss's gradient with respect to each score,
            [N].
        """
        crossing = _crossing(self.units, self.objective)
        routing = self.scorer.routing
        if routing is not None:
            is_cut = any(isinstance(unit, PartitionedTree) for unit in self.units)
            is_one_forward = not is_cut and sum(map(num_forwards, self.units)) == 1 and self.min_passes == 0
            routing.counts_first = bool(routing.losses.balance) and not is_one_forward
        counts_load = routing is not None and routing.counts_first
        self._begin("scoring", range(len(self.units)) if counts_load else crossing)
        vectors = {}
        if crossing:
            started = time.perf_counter()
            scores = [self._score(i, self.selected[i]) for i in crossing]
            leaves, sizes = joined_leaves(scores), [self.units[i].forest.num_tokens for i in crossing]
            selected = Selection.joined([self.selected[i] for i in crossing], sizes)
            loss = self._loss(leaves, selected.edges, selected)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            vectors = dict(zip(crossing, split_gradients(leaves, sizes), strict=True))
            self.scoring_s += time.perf_counter() - started
        if routing is not None and counts_load:
            started = time.perf_counter()
            for number, unit in enumerate(self.units):
                if number not in crossing and num_forwards(unit) > 0:
                    self._score(number, self.selected[number].only(np.zeros(0, np.int64)))
            with torch.no_grad():
                for _ in range(sum(map(num_forwards, self.units)), self.min_passes):
                    self.scorer.zero(hidden_states(self.scorer.parts, FILLER))
            routing.share_load()
            self.scoring_s += time.perf_counter() - started
        return vectors

    def _score(self, number: int, selected: Selection) -> EdgeScores:
        unit = self.units[number]
        scorer = self._scorer_of(unit, selected)
        scores = score_unit(unit, selected.wanted(unit.forest), scorer, progress=self._progress)
        self.num_scoring_tokens += unit.forest.num_tokens
        self._progress.reach(self.num_scoring_tokens)
        return scores

    def _run_whole(self, unit: MicroBatch, selected: Selection, vectors: EdgeScores | None) -> None:
        forest, has_entries = unit.forest, selected.entries.size > 0
        if not has_entries and self.objective.scope == "pair" and vectors is None:
            # Pairs of branches without a trained token have a loss, but no gradient.
            self._loss(self.scorer.no_scores(0), np.zeros(0, np.int64), selected)
        if forest.num_tokens == 0 or not (has_entries or self.scorer.routing):
            if self.min_passes:
                self._run_nothing()
            return
        self._num_passes += 1
        scorer = self._scorer_of(unit, selected)
        hidden, router_loss = scorer.forward(forest, branches_through(forest) if scorer.routing else None)
        losses = []
        if has_entries:
            table = edge_table(forest, selected.wanted(forest))
            loss_of = self._loss_of(table, table.edge_of_token(forest)[selected.edges], selected, vectors)
            if vectors is None and self.objective.scope != "entry":
                losses.append(loss_of(slice(0, table.edges.size), scorer.scores(hidden, forest, table)))
            else:
                losses.append(scorer.loss(hidden, forest, table, loss_of))
        if router_loss is not None:
            losses.append(router_loss.to(hidden.device))
        if not has_entries and self.min_passes:
            losses.append(scorer.zero(hidden))
        loss = sum(losses[1:], start=losses[0])
        if loss.requires_grad:
            backward_of(loss)

    def _run_partitioned(
        self, unit: PartitionedTree, selected: Selection, vectors: EdgeScores | None, before_last: Callable[[], None]
    ) -> None:
        assert self.parents is not None
        step = PartitionedStep(
            unit,
            edge_table(unit.forest, selected.wanted(unit.forest)),
            self._scorer_of(unit, selected),
            keeps=self.parents.parents == "keep",
            progress=self._progress,
        )
        parts = selected.split(step.owner_of_edge[selected.edges], len(unit.partitions))

        def loss_of(number: int, table: EdgeTable) -> LossOf:
            own = parts[number]
            return self._loss_of(table, step.local_edge[own.edges], own, vectors)

        step.backward(loss_of, before_last)
        self._num_passes += step.num_passes
        self.num_recomputed_tokens += step.num_recomputed

    def _run_nothing(self) -> None:
        """Run a forward and backward that adds zeros, so that a rank without work stays in step."""
        self._num_passes += 1
        nothing = self.scorer.zero(hidden_states(self.scorer.parts, FILLER))
        if nothing.requires_grad:
            nothing.backward()  # type: ignore[no-untyped-call]

    def _scorer_of(self, unit: Unit, selected: Selection) -> Scorer:
        """Return the scorer with the teacher's distributions of a unit, which live as long as the unit runs."""
        if self.teacher is None or selected.entries.size == 0:
            return self.scorer
        return replace(self.scorer, targets=self.teacher.targets(unit, selected))

    def _loss_of(
        self, table: EdgeTable, indices: Int64Array, selected: Selection, vectors: EdgeScores | None
    ) -> LossOf:
        """Return the loss of some edges of a table; `indices` [E] are the indices of the selected entries' edges."""

        def loss_of(at: slice, scores: EdgeScores) -> Tensor:
            if vectors is not None:
                return vector_product(scores, vectors, table.edges[at])
            inside = (indices >= at.start) & (indices < at.stop)
            return self._loss(scores, indices[inside] - at.start, selected.only(inside))

        return loss_of

    def _loss(self, scores: EdgeScores, indices: Int64Array, selected: Selection) -> Tensor:
        """Return the objective's loss of some entries, a scalar, and add it and the metrics to the sums.

        Args:
            scores: scores of some edges.
            indices: int64 [E], index in `scores` of each selected entry's edge.
            selected: E entries: whole branches if the objective's scope is "branch", whole pairs if it is "pair".
        """
        objective, batch = self.objective, self.batch
        at = to_device(indices, scores.logprobs.device)
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
        loss = (weights * terms.loss).sum()
        # Does not wait for the device: the sums are read once, at the end of the step.
        self.losses.append(loss.detach())
        for name, value in terms.metrics.items():
            self.metric_sums.setdefault(name, []).append((counts * value).sum().detach())
        return loss


def _local_pairs(batch: FlatBatch, branches: Int64Array, device: torch.device) -> Tensor | None:
    """Return the pairs whose branches are both in `branches`, as indices into it."""
    if batch.pairs is None:
        return None
    local_branch = np.full(batch.branch_tree.size, -1, np.int64)
    local_branch[branches] = np.arange(branches.size)
    local = local_branch[batch.pairs]
    return to_device(local[(local >= 0).all(1)], device)


def _sum(scalars: Sequence[Tensor]) -> float:
    """Sum in float64 and in order, with one transfer."""
    return sum(torch.stack([one.double() for one in scalars]).tolist()) if scalars else 0.0


@contextmanager
def _without_cast_cache(device: torch.device) -> Iterator[None]:
    """Switch off autocast's cache of cast weights before torch 2.11.

    A pass after one without gradients would reuse its casts, and give these weights no gradient.
    """
    before = torch.is_autocast_cache_enabled()
    is_stale = torch.__version__ < "2.11" and torch.is_autocast_enabled(device.type)
    torch.set_autocast_cache_enabled(before and not is_stale)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _reduced_over_ranks(
    team: StepRanks, model: TreeModel, value_head: nn.Module | None
) -> Iterator[Callable[[], None]]:
    """Reduce gradients over ranks after the passes of a step, which run inside this context and `tree_attention`.

    Sharded weights are reduced by their units: in every pass, or at the end. Weights that every rank holds whole, such
    as those of a value head or of a model inside DDP, are summed at the end.

    Yield a function to call before the last backward. Whole weights are then summed while that backward runs, so no
    rank may sum anything else until the block ends.

    Raises:
        UnsupportedError: a sharded value head.
    """
    if team.mode is None:
        yield _nothing
        return
    if value_head is not None and sharded_units(value_head):
        raise UnsupportedError(
            "a value head must be whole on every rank, and fully_shard has sharded this one; exclude it from "
            "fully_shard, and backward sums its gradients"
        )
    shards = model.shards
    units = () if shards is None else shards.units

    def zero() -> Tensor:
        assert shards is not None
        return shards.zero_in_one_entry(lambda run: hidden_states(replace(model, run=run), FILLER))

    weights = whole_weights(units, model.model, value_head)
    try:
        with (
            summed(weights, team.group) as before_last,
            gathered(units if team.mode == "gathered" else (), zero),
        ):
            # Sharded units communicate during the backward, where the sums of whole weights would mix with theirs.
            yield _nothing if units else before_last
    except BaseException:
        reset(units)
        raise
