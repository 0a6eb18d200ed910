"""The tree step: takes one optimizer batch of forests, adds the exact gradients of its branches to `.grad`.

Log-probs are gathered along each branch, so a loss written for flat sequences works unchanged, and autograd's
scatter-add through the gather sums the gradients of shared tokens. If an objective needs a whole branch or pair that is
not computed in one forward, the step runs twice: a pass without gradients gives the loss's gradient with respect to
every log-prob, and the model's own backward takes these vectors.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from treering.errors import InputError
from treering.model.context import is_active, tree_attention
from treering.model.families import find_parts
from treering.model.forward import with_features
from treering.model.routers import router_hooks
from treering.ranks.agreement import agreeing
from treering.ranks.setup import RanksOption, ranks_of, without_ddp
from treering.train.gradient.activations import ParentsChoice, ParentsOption, check_parents
from treering.train.gradient.auto_tokens import DEFAULT_TOKENS, MaxTokens, run_by_memory, tokens_that_fit
from treering.train.gradient.checks import check_inputs, routers_of
from treering.train.gradient.flat_batch import flatten_batch, read_entries
from treering.train.gradient.passes import count_passes, units_of
from treering.train.gradient.rank_sums import reduced_over_ranks
from treering.train.gradient.router_losses import RouterLosses, Routing
from treering.train.gradient.run import StepRun
from treering.train.gradient.scoring import Scorer
from treering.train.gradient.teacher import StepTeacher, teacher_parts, teaching
from treering.train.objectives import Objective
from treering.train.progress import OnProgress
from treering.tree.forest import Forest
from treering.tree.plan.costs import CostModel
from treering.tree.plan.plan import Plan, plan_batch

FILL_TOKENS = MappingProxyType({"cpu": 2048})
"""Tokens per micro-batch under a larger `max_tokens`, by device: small trees are combined up to it, and larger ones are
cut into partitions if that costs nothing. A CPU is busy with fewer tokens, and larger tensors are allocated on fresh
pages each time: with 8,192 tokens each took 6 to 25 % longer than with 2,048 (8 layers of 512)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BackwardResult:
    """The result of a tree step.

    Attributes:
        loss: the objective over the whole batch (this rank's share, if ranks share denominators), router losses added.
        num_trained_tokens: trained entries, counted per branch; under `once` a shared one counts once.
        averages: the objective's own metrics, averaged over trained entries (over pairs, for dpo); with router losses
            also `router_balance`, `router_z` and `expert_load_max`, of all ranks (see `Routing.metrics`).
        plan: the micro-batches and partitioned trees of the step.
        parents: what was done with partitions' activations, and why; None if no tree was partitioned.
        num_recomputed_tokens: tokens whose forward ran twice for that.
        num_scoring_tokens: tokens of the pass without gradients that sequence-level objectives and balance losses may
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
        """All metrics for a log: the averages, token counts, achieved `sharing`, `num_micro_batches`."""
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
    model: nn.Module,
    forests: Forest | Iterable[Forest],
    objective: Objective,
    max_tokens: MaxTokens = None,
    *,
    temperature: float = 1.0,
    value_head: nn.Module | None = None,
    parents: ParentsOption = "auto",
    costs: CostModel | None = None,
    backend: str = "auto",
    ranks: RanksOption | None = None,
    router_losses: RouterLosses | None = None,
    on_progress: OnProgress | None = None,
) -> BackwardResult:
    """Adds the objective's gradients to `.grad`, equal to those of training every branch as a flat sequence.

    Enters `tree_attention`, also of a teacher, unless the caller is already inside it. Denominators cover the whole
    batch, so `max_tokens` changes memory and rounding, never the gradient. A tree over the budget runs in partitions.

    Args:
        model: a supported Hugging Face causal language model, or a PEFT model of one; on several ranks as it was passed
            to `treering.ranks.prepare`.
        forests: the optimizer batch, on several ranks this one's share; per-branch values of the objective are in the
            order of forests, then sequences.
        objective: from `treering.objectives`.
        max_tokens: most distinct tokens per micro-batch and partition; fewer are used where that is faster
            (`FILL_TOKENS`). None runs everything at once. "auto" takes on CUDA what free memory holds by measured bytes
            per token, and halves it with a warning where memory runs out all the same; elsewhere, and on several ranks,
            it is 16,384.
        temperature: divides the logits, as at sampling time.
        value_head: hidden states [R, C] to values [R, 1], for objectives that train one; its gradients are added too.
        parents: "keep" the activations of partitions that others descend from (nothing is computed twice), "recompute"
            or "offload" them, or "auto": the first of keep, offload, recompute that fits. See `result.parents`.
        costs: skips sharing in trees where it would be slower; None always shares.
        backend: attention backend; ignored inside `tree_attention`.
        ranks: how ranks of a prepared model keep step. "sharded": weights of `fully_shard` are gathered in every pass,
            and all ranks run the same passes; where only their number differs, empty ones follow. "gathered": weights
            stay gathered during the step, ranks run any passes, and gradients are reduced once at its end. None takes
            "sharded" where weights are sharded, else "gathered". "alone": this rank trains a model by itself.
        router_losses: losses on a mixture of experts' routers that are added to the objective's; None adds none.
        on_progress: called after each micro-batch and partition with the tokens done and planned, on several ranks of
            this one; changes no result.

    Raises:
        InputError: per-branch values that do not fit the branches, a token outside the vocabulary, a value head where
            the objective trains none, or none where it does; a teacher of another vocabulary, or scores of one that do
            not fit the branches. No gradient has been added then.
        ConfigError: options that contradict each other.
        StateError: gradients are switched off, or no parameter requires one; several ranks run and the model is not
            prepared, or another rank has other passes or refuses its share.
        UnsupportedError: a model that would not be exact; router losses of a model without routers, or under
            reentrant gradient checkpointing.

    An error from elsewhere, such as a lack of memory, may leave part of the gradients: clear them before going on.

    Example:
        >>> forest = Forest.from_sequences([[5, 6, 7], [5, 6, 8]])
        >>> result = backward(model, forest, sft())                # doctest: +SKIP
        >>> result.plan.num_tokens, result.metrics["sharing"]      # doctest: +SKIP
        (4, 0.333)
    """
    if not isinstance(forests, Iterable | Forest):
        raise InputError(f"expected a Forest or several, got {forests!r}: make one with Forest.from_sequences")
    forests = [forests] if isinstance(forests, Forest) else list(forests)
    step = partial(
        _backward,
        without_ddp(model),
        forests,
        objective,
        temperature=temperature,
        value_head=value_head,
        parents=parents,
        costs=costs,
        backend=backend,
        ranks=ranks,
        router_losses=router_losses,
        on_progress=on_progress,
    )
    if max_tokens != "auto":
        return step(max_tokens)
    if ranks_of(without_ddp(model), ranks).group.size > 1:
        return step(DEFAULT_TOKENS)
    parts = find_parts(without_ddp(model))
    weights = [*model.parameters(), *(() if value_head is None else value_head.parameters())]

    def first() -> int:
        inside = nullcontext() if is_active(parts) else tree_attention(model, backend)
        # Compiled layers keep the hooks of their first forward.
        with inside, router_hooks(routers_of(router_losses, parts)), _casting_anew(parts.device):
            return tokens_that_fit(parts)

    return run_by_memory(parts, weights, step, first)


def _backward(
    model: nn.Module,
    forests: list[Forest],
    objective: Objective,
    max_tokens: int | None,
    *,
    temperature: float,
    value_head: nn.Module | None,
    parents: ParentsOption,
    costs: CostModel | None,
    backend: str,
    ranks: RanksOption | None,
    router_losses: RouterLosses | None,
    on_progress: OnProgress | None,
) -> BackwardResult:
    team = ranks_of(model, ranks)
    # All checks come before the first gradient is added and before ranks communicate.
    with agreeing(team.group) as agreement:
        parts = find_parts(model)
        check_inputs(model, parts, forests, objective, temperature, value_head)
        scorer = Scorer(
            parts=parts,
            temperature=temperature,
            entropy_of="all" if "entropy" in objective.needs else "none",
            value_head=value_head,
            reads_logprobs=objective.reads_logprobs,
        )
        of_teacher = teacher_parts(objective.distillation, student=parts, forests=forests)
        check_parents(parents, scorer.device)
        routers = routers_of(router_losses, parts)
        plan = plan_step(
            forests,
            objective,
            max_tokens,
            device=scorer.device,
            costs=costs,
            in_step=team.mode == "sharded",
            router_losses=router_losses,
        )
        entries = read_entries(forests, objective)
        teacher = None
        if objective.distillation is not None:
            teacher = StepTeacher(
                objective.distillation, of_teacher, student=parts, forests=forests, temperature=temperature
            )
            teacher.check(units_of(plan), entries)
            scorer = replace(scorer, divergence=teacher.divergence)
        agreement.what = f"{objective.name} with ranks={team.mode!r} and router_losses={router_losses}"
        agreement.num_passes = count_passes(plan, objective) if team.mode == "sharded" else 0
    inside = nullcontext() if is_active(parts) else tree_attention(model, backend)
    reducing = reduced_over_ranks(team, parts, model, value_head)
    teaching_too = teaching(objective.distillation, of_teacher, backend)
    with inside, teaching_too, router_hooks(routers), _casting_anew(scorer.device), reducing:
        parts = with_features(parts, forests)
        scorer = replace(scorer, parts=parts)
        batch = flatten_batch(entries, objective, team.group.sum)
        routing = None
        if router_losses is not None and routers is not None:
            routing = Routing(router_losses, routers, plan.num_branch_tokens, team.group.sum)
        run = StepRun(
            plan,
            objective,
            batch,
            scorer,
            parents=parents,
            min_passes=agreement.num_passes,
            routing=routing,
            teacher=teacher,
            on_progress=on_progress,
        )
        run.backward()
        if parts.features is not None:
            parts.features.backward()
        # Values of the device are read from here on.
        if routing is not None and not routing.has_load:
            routing.share_load()
    num_terms = batch.num_trained if objective.pairs is None else float(len(objective.pairs))
    return BackwardResult(
        loss=run.totals.loss + (0.0 if routing is None else routing.total),
        num_trained_tokens=batch.num_trained,
        averages=run.totals.averages(num_terms) | ({} if routing is None else routing.metrics()),
        plan=replace(plan, ranks=team.mode),
        parents=run.parents,
        num_recomputed_tokens=run.num_recomputed_tokens,
        num_scoring_tokens=run.num_scoring_tokens,
        scoring_s=run.scoring_s,
    )


@contextmanager
def _casting_anew(device: torch.device) -> Iterator[None]:
    """Inside, autocast of torch 2.10 casts weights in every pass.

    Its cache keeps those of a pass without gradients, and the next pass would train none of them.
    """
    before = torch.is_autocast_cache_enabled()
    is_anew = torch.__version__ < "2.11" and torch.is_autocast_enabled(device.type)
    torch.set_autocast_cache_enabled(before and not is_anew)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def plan_step(
    forests: Sequence[Forest],
    objective: Objective,
    max_tokens: int | None,
    *,
    device: torch.device,
    costs: CostModel | None = None,
    in_step: bool = False,
    router_losses: RouterLosses | None = None,
) -> Plan:
    """The plan that `backward` follows: `plan_batch` with the fastest number of tokens for the device.

    For ranks that run the same passes (`in_step`), only `max_tokens` counts, because no tree of theirs may be cut. The
    same holds for a batch with a balance loss that fits into one forward, because one forward needs no counting pass.

    Raises:
        InputError: see `plan_batch`.

    Example: under a budget of 16,384 a tree of 5,000 tokens is three partitions on CPU, but whole for gspo, whose
    partitions would need a pass without gradients.
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
        costs=costs,
    )
