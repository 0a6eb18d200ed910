"""The tree step: one optimizer batch of forests in, exact gradients of its branches out.

Joins plan, model and objective. Log-probs are gathered along each branch, so a loss written for flat sequences works
unchanged, and autograd's scatter-add through the gather restores the gradients of shared tokens.

    F flat entries: every token of every branch, branches one after another
"""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from treering.errors import InputError, StateError
from treering.model.context import is_active, tree_attention
from treering.model.families import find_parts
from treering.model.forward import check_forest, check_temperature, forward
from treering.train.objectives import Entries, Objective
from treering.train.weights import SumOverRanks, entry_counts, entry_weights
from treering.tree.forest import Forest
from treering.tree.plan import MicroBatch, Plan, plan_batch

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BackwardResult:
    """What a tree step computed.

    Attributes:
        loss: the objective over the whole batch (this rank's share, if ranks share denominators).
        num_trained_tokens: entries that were trained, counted by branches; under `once` a shared one counts once.
        averages: the objective's own metrics, averaged over trained entries.
        plan: the micro-batches that were run.
    """

    loss: float
    num_trained_tokens: float
    averages: dict[str, float]
    plan: Plan

    @property
    def metrics(self) -> dict[str, float]:
        """All figures for a log: the averages, `num_trained_tokens`, `sharing` and `num_micro_batches`."""
        return {
            **self.averages,
            "num_trained_tokens": self.num_trained_tokens,
            "sharing": self.plan.sharing,
            "num_micro_batches": float(len(self.plan.micro_batches)),
        }


def backward(
    model: nn.Module,
    forests: Forest | Iterable[Forest],
    objective: Objective,
    max_tokens: int | None = None,
    *,
    temperature: float = 1.0,
    backend: str = "auto",
    sum_over_ranks: SumOverRanks | None = None,
) -> BackwardResult:
    """Adds the objective's gradients to `.grad`, equal to those of training every branch as a flat sequence.

    Enters `tree_attention` unless the caller is already inside it. Denominators cover the whole batch, so `max_tokens`
    changes memory and rounding, never the gradient.

    Args:
        model: a supported Hugging Face causal language model, or a PEFT model of one.
        forests: the optimizer batch. Per-branch values of the objective follow their order: forests, then sequences.
        objective: from `treering.objectives`.
        max_tokens: distinct tokens per micro-batch; whole trees only. None runs everything at one time.
        temperature: divides the logits, as at sampling time.
        backend: attention backend; ignored inside `tree_attention`.
        sum_over_ranks: sums a float64 array over data-parallel ranks, so that denominators cover all of them; gradients
            are then to be summed, not averaged, over ranks. None on one rank.

    Raises:
        InputError: per-branch values that do not fit the branches, a tree over the budget, a token outside the
            vocabulary. No gradient has been added then.
        StateError: gradients are switched off, or no parameter takes any.
        UnsupportedError: a model that would not be exact, by name.

    Example:
        >>> forest = Forest.from_sequences([[5, 6, 7], [5, 6, 8]])
        >>> result = backward(model, forest, sft())                # doctest: +SKIP
        >>> result.plan.num_tokens, result.metrics["sharing"]      # doctest: +SKIP
        (4, 0.333)
    """
    forests = [forests] if isinstance(forests, Forest) else list(forests)
    # Everything that can be refused is refused before the first gradient is added, and before ranks meet.
    _check_inputs(model, forests, objective, temperature)
    plan = plan_batch(forests, max_tokens)
    totals = _Totals()
    with nullcontext() if is_active(find_parts(model)) else tree_attention(model, backend):
        batch = _flat_batch(forests, objective, sum_over_ranks or _on_one_rank)
        for micro_batch in plan.micro_batches:
            _run(model, micro_batch, objective, batch, temperature, totals)
    num_trained = float(batch.counts.sum())
    return BackwardResult(
        loss=totals.loss, num_trained_tokens=num_trained, averages=totals.averages(num_trained), plan=plan
    )


def _check_inputs(model: nn.Module, forests: list[Forest], objective: Objective, temperature: float) -> None:
    parts = find_parts(model)
    check_temperature(temperature)
    for forest in forests:
        check_forest(forest, parts)
    if not isinstance(objective, Objective):
        raise InputError(f"expected an objective, got {objective!r}: call one, such as treering.objectives.sft()")
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise StateError("backward needs gradients, and they are switched off here: leave no_grad or inference_mode")
    if not any(weight.requires_grad for weight in model.parameters()):
        raise StateError("backward needs a parameter with requires_grad=True, and all are frozen: unfreeze some")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _FlatBatch:
    """Per-entry data of all branches of the optimizer batch; branch i owns entries offsets[i] to offsets[i + 1]."""

    offsets: NDArray[np.int64]  # [K + 1]
    counts: Float64Array  # [F]
    weights: Float64Array  # [F]
    values: dict[str, Float64Array]  # [F] each

    def entries_of(self, branches: NDArray[np.int64]) -> NDArray[np.int64]:
        """Entry numbers of some branches, one after another."""
        parts = [np.arange(self.offsets[i], self.offsets[i + 1]) for i in branches]
        return np.concatenate([np.zeros(0, np.int64), *parts])


class _Totals:
    """Sums over micro-batches."""

    def __init__(self) -> None:
        self.loss = 0.0
        self._metric_sums: dict[str, float] = {}

    def add(self, loss: Tensor, metrics: dict[str, Tensor]) -> None:
        self.loss += float(loss)
        for name, value in metrics.items():
            self._metric_sums[name] = self._metric_sums.get(name, 0.0) + float(value)

    def averages(self, num_trained: float) -> dict[str, float]:
        return {name: value / max(num_trained, 1e-300) for name, value in self._metric_sums.items()}


def _flat_batch(forests: list[Forest], objective: Objective, sum_over_ranks: SumOverRanks) -> _FlatBatch:
    empty = np.zeros(0, np.int64)
    branch_length = np.concatenate([empty, *(forest.branch_length for forest in forests)])
    tree_offsets = np.cumsum([0, *(forest.num_trees for forest in forests)])
    branch_tree = [forest.branch_tree + first for forest, first in zip(forests, tree_offsets, strict=False)]
    counts = entry_counts(forests, objective.masks(branch_length), objective.weighting.shared)
    values = objective.flat_values(branch_length, trained=counts > 0)
    weights = entry_weights(
        counts,
        branch_length=branch_length,
        branch_tree=np.concatenate([empty, *branch_tree]),
        weighting=objective.weighting,
        sum_over_ranks=sum_over_ranks,
    )
    offsets = np.concatenate([[0], np.cumsum(branch_length)]).astype(np.int64)
    return _FlatBatch(offsets=offsets, counts=counts, weights=weights, values=values)


def _run(
    model: nn.Module,
    micro_batch: MicroBatch,
    objective: Objective,
    batch: _FlatBatch,
    temperature: float,
    totals: _Totals,
) -> None:
    forest = micro_batch.forest
    indices, _ = forest.paths()
    entries = batch.entries_of(micro_batch.branches)
    trained = batch.counts[entries] > 0
    indices, entries = indices[trained], entries[trained]
    if entries.size == 0:
        return
    wanted = np.zeros(forest.num_tokens, bool)
    wanted[indices] = True
    scored = forward(model, forest, temperature, wanted=wanted, entropy_of="none")
    logprobs = scored.logprobs[torch.from_numpy(indices.astype(np.int64)).to(scored.logprobs.device)]

    def on_entries(values: Float64Array) -> Tensor:
        return torch.from_numpy(values[entries]).to(logprobs)

    values = {name: on_entries(array) for name, array in batch.values.items()}
    terms = objective.terms(Entries(logprobs=logprobs, values=values))
    loss = (on_entries(batch.weights) * terms.loss).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    counts = on_entries(batch.counts)
    totals.add(loss.detach(), {name: (counts * value).sum() for name, value in terms.metrics.items()})


def _on_one_rank(values: Float64Array) -> Float64Array:
    return values
