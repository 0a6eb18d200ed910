"""The tree step: take one optimizer batch of forests, and add the exact gradients of its branches to `.grad`.

Log-probs are gathered along each branch, so a loss written for flat sequences works unchanged. The backward of that
gather (`_Passes._weighted_loss`) sums the branches' gradients on a shared token.

If an objective needs a whole branch or pair that does not fit into one forward, the step makes two passes. The first,
without gradients, gives the loss's gradient with respect to every log-prob; the second takes that gradient back through
the model.

`backward` chooses the number of tokens at one time; `_Call.run` checks the arguments, plans units and flattens entries;
`_Passes` runs the units.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from treering.arrays import Float64Array, Int64Array
from treering.attention.layout import to_device
from treering.errors import InputError, StateError
from treering.model.checks import check_no_hooks
from treering.model.context import is_active, tree_attention, without_cast_cache
from treering.model.edges import EdgeScores, EdgeTable, LossOf, edge_table
from treering.model.forward import FILLER, check_forest, check_temperature, hidden_states, with_features
from treering.model.routers import Routers, find_routers, router_hooks
from treering.model.three_pass import backward_of, begin_step
from treering.model.tree_model import TreeModel
from treering.ranks.gathering import reduced_over_ranks
from treering.ranks.group import agreeing
from treering.ranks.setup import RanksOption, StepRanks, ranks_of, without_ddp
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
from treering.train.objective import Entries, Objective, checked_terms
from treering.train.partitioned import PartitionedStep, score_unit
from treering.train.progress import OnProgress, PhaseProgress
from treering.train.router_losses import RouterFactors, Routing, branches_through
from treering.train.scorer import Scorer, joined_leaves, split_gradients, vector_product
from treering.train.step_plan import count_passes, crossing_units, num_forwards, plan_step
from treering.train.step_teacher import StepTeacher
from treering.tree.forest import Forest
from treering.tree.partition import PartitionedTree
from treering.tree.plan import MicroBatch, Plan, Unit


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
    given = model if isinstance(model, TreeModel) else without_ddp(model)
    call = _Call(
        given=given,
        forests=[forests] if isinstance(forests, Forest) else list(forests),
        objective=objective,
        temperature=temperature,
        value_head=value_head,
        backend=backend,
        team=ranks_of(given.model if isinstance(given, TreeModel) else given, ranks),
        router_losses=router_losses,
        on_progress=on_progress,
    )
    if max_tokens != "auto":
        return call.run(max_tokens)
    if call.team.rank_group.size > 1:
        tokens = fewest_on_ranks(call.team.rank_group, call.tokens_that_fit)
        # Ranks that run the same passes cannot cut a tree, so an estimate that is too low for one gives way.
        largest = max((forest.num_tokens for forest in call.forests), default=0) if call.team.mode == "sharded" else 0
        return call.run(max(tokens, min(largest, DEFAULT_TOKENS)))
    return run_by_memory(TreeModel.of(given), call.weights, call.run, call.tokens_that_fit)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    """One call of `backward`, which may run several times if memory runs out.

    Attributes:
        given: the model as given, without DDP; every run binds it again, in case it has changed.
        team: the ranks, and how they keep step.
    """

    given: nn.Module | TreeModel
    forests: Sequence[Forest]
    objective: Objective
    temperature: float
    value_head: nn.Module | None
    backend: str
    team: StepRanks
    router_losses: RouterFactors | None
    on_progress: OnProgress | None

    @property
    def weights(self) -> list[nn.Parameter]:
        """Weights of the model and of a value head."""
        module = self.given.model if isinstance(self.given, TreeModel) else self.given
        return [*module.parameters(), *(() if self.value_head is None else self.value_head.parameters())]

    def run(self, max_tokens: int | None) -> BackwardResult:
        """Run the step with at most `max_tokens` at one time."""
        objective, team = self.objective, self.team
        # All checks come before the first gradient is added and before ranks communicate.
        with agreeing(team.rank_group) as agreement:
            model = TreeModel.of(self.given)
            _check_inputs(model, self.forests, objective, self.temperature, self.value_head)
            teacher = None
            if objective.distillation is not None:
                teacher = StepTeacher(
                    objective.distillation,
                    student=model,
                    forests=self.forests,
                    temperature=self.temperature,
                    backend=self.backend,
                )
            routers = self._routers(model)
            in_step = team.mode == "sharded"
            plan = plan_step(
                self.forests,
                objective,
                max_tokens,
                device=model.device,
                in_step=in_step,
                router_losses=self.router_losses,
            )
            entries = read_entries(self.forests, objective)
            if teacher is not None:
                teacher.check(plan.units, entries)
            agreement.what = f"{objective.name} with ranks={team.mode!r} and router_losses={self.router_losses}"
            agreement.num_passes = count_passes(plan, objective) if in_step else 0

        def run_filler(decoder: Callable[..., Any]) -> Tensor:
            return hidden_states(replace(model, run=decoder), FILLER)

        teaching = nullcontext() if teacher is None else teacher.active()
        reducing: AbstractContextManager[Callable[[], None]] = nullcontext(_do_nothing)
        if team.mode is not None:
            reducing = reduced_over_ranks(team, model.model, model.shards, self.value_head, run_filler)
        with self._inside(model, routers), teaching, reducing as before_last:
            batch = flatten_batch(entries, objective, team.rank_group.sum)
            routing = None
            if self.router_losses is not None and routers is not None:
                routing = Routing(self.router_losses, routers, plan.num_branch_tokens, team.rank_group.sum)
            scorer = Scorer(
                model=with_features(model, self.forests),
                temperature=self.temperature,
                entropy_of="all" if "entropy" in objective.needs else "none",
                value_head=self.value_head,
                reads_logprobs=objective.reads_logprobs,
                divergence=None if teacher is None else teacher.divergence,
                routing=routing,
            )
            features = scorer.model.features
            passes = _Passes(
                objective=objective,
                batch=batch,
                scorer=scorer,
                units=plan.units,
                selected=[batch.select(unit.forest, unit.branches) for unit in plan.units],
                min_passes=agreement.num_passes,
                teacher=teacher,
                on_progress=self.on_progress,
                before_last=before_last if features is None else _do_nothing,
            )
            passes.run()
            if features is not None:
                features.backward()
        return _result(passes, replace(plan, ranks=team.mode))

    def tokens_that_fit(self) -> int:
        """Return the number of tokens for which free memory has room."""
        model = TreeModel.of(self.given)
        with self._inside(model, self._routers(model)):
            return tokens_that_fit(model, self.weights, self.team.mode)

    @contextmanager
    def _inside(self, model: TreeModel, routers: Routers | None) -> Iterator[None]:
        """Prepare the model for every forward of the step; compiled layers keep the hooks of their first one."""
        with ExitStack() as stack:
            if not is_active(model):
                stack.enter_context(tree_attention(model, self.backend))
            if routers is not None:
                stack.enter_context(router_hooks(routers))
            stack.enter_context(without_cast_cache(model.device))
            yield

    def _routers(self, model: TreeModel) -> Routers | None:
        if self.router_losses is None:
            return None
        if not isinstance(self.router_losses, RouterFactors):
            raise InputError(
                f"router_losses must be RouterLosses, such as RouterLosses(balance=0.001), got {self.router_losses!r}"
            )
        return find_routers(model)


def _check_inputs(
    model: TreeModel,
    forests: Sequence[Forest],
    objective: Objective,
    temperature: float,
    value_head: nn.Module | None,
) -> None:
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
            self.parents = choose_parents(self.scorer.model, chain_tokens=max(chains))
        begin_step()
        weights = {one: one._version for one in self.scorer.model.model.parameters() if one.requires_grad}
        vectors = self._score_first()
        self._begin("training", range(len(self.units)))
        num_done = 0
        for number, unit in enumerate(self.units):
            is_last = number == len(self.units) - 1 and not self.min_passes
            before_last = self.before_last if is_last else _do_nothing
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
        crossing = crossing_units(self.units, self.objective)
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
            loss = self._weighted_loss(leaves, selected.edges, selected)
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
                    self.scorer.zero(hidden_states(self.scorer.model, FILLER))
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
            self._weighted_loss(self.scorer.no_scores(0), np.zeros(0, np.int64), selected)
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
            loss_of = self._loss_of_edges(table, table.edge_of_token(forest)[selected.edges], selected, vectors)
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
            keeps=self.parents.keeps,
            progress=self._progress,
        )
        parts = selected.split(step.owner_of_edge[selected.edges], len(unit.partitions))

        def loss_of(number: int, table: EdgeTable) -> LossOf:
            own = parts[number]
            return self._loss_of_edges(table, step.local_edge[own.edges], own, vectors)

        step.backward(loss_of, before_last)
        self._num_passes += step.num_passes
        self.num_recomputed_tokens += step.num_recomputed

    def _run_nothing(self) -> None:
        """Run a forward and backward that adds zeros, so that a rank without work stays in step."""
        self._num_passes += 1
        nothing = self.scorer.zero(hidden_states(self.scorer.model, FILLER))
        if nothing.requires_grad:
            nothing.backward()  # type: ignore[no-untyped-call]

    def _scorer_of(self, unit: Unit, selected: Selection) -> Scorer:
        """Return the scorer with the teacher's distributions of a unit, which live as long as the unit runs."""
        if self.teacher is None or selected.entries.size == 0:
            return self.scorer
        return replace(self.scorer, targets=self.teacher.targets(unit, selected))

    def _loss_of_edges(
        self, table: EdgeTable, indices: Int64Array, selected: Selection, vectors: EdgeScores | None
    ) -> LossOf:
        """Return the loss of some edges of a table; `indices` [E] are the indices of the selected entries' edges."""

        def loss_of(at: slice, scores: EdgeScores) -> Tensor:
            if vectors is not None:
                return vector_product(scores, vectors, table.edges[at])
            inside = (indices >= at.start) & (indices < at.stop)
            return self._weighted_loss(scores, indices[inside] - at.start, selected.only(inside))

        return loss_of

    def _weighted_loss(self, scores: EdgeScores, indices: Int64Array, selected: Selection) -> Tensor:
        """Return the objective's loss of some entries, a scalar, and add it and the metrics to the sums.

        The gradient of a token's log-prob is the sum over the branches b that train it of w_b dterm_b/dlogprob, with w
        from `entry_weights`: `scores.logprobs[at]` has a row for each such branch, and the backward of an index adds.

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
        pairs = None if batch.pairs is None else batch.local_pairs(selected.branches)
        found = objective.terms(
            Entries(
                logprobs=logprobs,
                values={name: on_entries(array) for name, array in batch.values.items()},
                branch=to_device(selected.branch, logprobs.device),
                num_branches=selected.branches.size,
                entropy=scores.entropy[at] if "entropy" in objective.needs else None,
                state_values=values if "value" in objective.needs else None,
                divergence=None if scores.divergence is None else scores.divergence[at].to(logprobs.dtype),
                pairs=None if pairs is None else to_device(pairs, logprobs.device),
            )
        )
        terms = checked_terms(objective.name, found, logprobs, logprobs.numel() if pairs is None else len(pairs))
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


def _do_nothing() -> None:
    """Take the place of a function to call before the last backward where no sums of ranks overlap with it."""


def _result(passes: _Passes, plan: Plan) -> BackwardResult:
    """Return the result of finished passes; values on the device are read here."""
    routing, batch, pairs = passes.scorer.routing, passes.batch, passes.objective.pairs
    if routing is not None and not routing.has_load:
        routing.share_load()
    num_terms = batch.num_trained if pairs is None else float(len(pairs))
    averages = {name: _sum(values) / max(num_terms, 1e-300) for name, values in passes.metric_sums.items()}
    return BackwardResult(
        loss=_sum(passes.losses) + (0.0 if routing is None else routing.total),
        num_trained_tokens=batch.num_trained,
        averages=averages | ({} if routing is None else routing.metrics()),
        plan=plan,
        parents=passes.parents,
        num_recomputed_tokens=passes.num_recomputed_tokens,
        num_scoring_tokens=passes.num_scoring_tokens,
        scoring_s=passes.scoring_s,
    )


def _sum(scalars: Sequence[Tensor]) -> float:
    """Sum in float64 and in order, with one transfer."""
    return sum(torch.stack([one.double() for one in scalars]).tolist()) if scalars else 0.0
