"""Log-probs of arbitrary tokens at the states of sequences, with gradients; a shared state is computed once.

Other losses score the next token of a sequence. Here each state may have its own targets: a token other than the next
one, or several, such as a teacher's likeliest tokens. Targets are scored; they are never computed as tokens.

    B sequences   T tokens of a sequence   k targets of a state   E distinct pairs of a state and a target
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from treering.arrays import Float64Array, Int64Array
from treering.errors import InputError, StateError
from treering.model.checks import check_no_hooks
from treering.model.context import is_active, tree_attention
from treering.model.edges import EdgeScores, EdgeTable, LossOf
from treering.model.forward import check_forest
from treering.model.three_pass import backward_of, begin_step
from treering.model.tree_model import TreeModel
from treering.train.memory import choose_parents
from treering.train.partitioned import PartitionedStep
from treering.train.scorer import Scorer
from treering.train.step_plan import FILL_TOKENS
from treering.tree.forest import Forest
from treering.tree.partition import PartitionedTree
from treering.tree.plan import Unit, plan_batch

LossOfTargets = Callable[[int, Tensor], Tensor]
"""(index of a sequence, log-probs of its targets in their shape) -> its part of the loss, a scalar."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetScores:
    """Result of `score_targets`.

    Attributes:
        logprobs: B arrays, float64, in the shape of the targets.
        losses: B numbers, 0 without a loss.
        num_flat_tokens: tokens of the sequences, counted separately.
        num_computed_tokens: distinct tokens computed, including those that partitions computed twice.
    """

    logprobs: list[Float64Array]
    losses: list[float]
    num_flat_tokens: int
    num_computed_tokens: int


def score_targets(
    model: nn.Module | TreeModel,
    sequences: Sequence[Sequence[int] | NDArray[np.integer[Any]]],
    targets: Sequence[Int64Array],
    *,
    loss: LossOfTargets | None = None,
    trains: bool = True,
    max_tokens: int | None = None,
    backend: str = "auto",
) -> TargetScores:
    """Score targets at every state of some sequences, and add the gradients of a loss on their log-probs to `.grad`.

    Args:
        model: a supported Hugging Face causal language model, a PEFT model of one, or the `TreeModel` of either.
        sequences: B times int [T], T >= 1.
        targets: B times int64 [T] or [T, k], k >= 1: row t is scored at the state after token t.
        loss: computes one sequence's part of the loss, which is their sum; None computes no loss.
        trains: whether to compute the gradients of the loss.
        max_tokens: distinct tokens computed at one time; a larger tree runs in partitions. None sets no limit.
        backend: attention backend; ignored inside `tree_attention`.

    Raises:
        InputError: targets that do not fit their sequence or the vocabulary; no gradient has been added.
        StateError: a loss that is not finite; some gradients may have been added.
        UnsupportedError: a model whose gradients would not be exact.

    Example:
        >>> scores = score_targets(model, [[5, 6], [5, 7]], [[6, 8], [[7, 9], [8, 8]]])       # doctest: +SKIP
        >>> scores.logprobs[1].shape, scores.num_flat_tokens, scores.num_computed_tokens      # doctest: +SKIP
        ((2, 2), 4, 3)
    """
    bound = TreeModel.of(model)
    check_no_hooks(bound)
    targets = [np.asarray(each, np.int64) for each in targets]
    forest = Forest.from_sequences(sequences)
    check_forest(forest, bound)
    _check_targets(forest, targets, bound.vocab_size)
    trains = trains and loss is not None
    if trains and not any(weight.requires_grad for weight in bound.model.parameters()):
        raise StateError("gradients need trainable weights, and all weights of this model are frozen; unfreeze some")
    fill_tokens = None if max_tokens is None else FILL_TOKENS.get(bound.device.type)
    plan = plan_batch([forest], max_tokens, fill_tokens=fill_tokens, cut_tokens=fill_tokens)
    scorer = Scorer(model=bound)
    found: list[Float64Array] = [np.zeros(0)] * len(targets)
    losses = [0.0] * len(targets)
    num_computed = 0
    begin_step()
    with nullcontext() if is_active(bound) else tree_attention(bound, backend):
        for unit in plan.units:
            slots = _Slots.of(unit, targets)
            num_computed += unit.forest.num_tokens
            if isinstance(unit, PartitionedTree):
                logprobs = _scores_in_partitions(unit, slots.table, scorer).requires_grad_(trains)
            else:
                with torch.set_grad_enabled(trains):
                    hidden, _ = scorer.forward(unit.forest)
                    logprobs = scorer.scores(hidden, unit.forest, slots.table).logprobs
            if loss is not None:
                total = slots.total(logprobs, loss, losses)
                if trains and isinstance(unit, PartitionedTree):
                    num_computed += _train_partitions(unit, slots.table, scorer, logprobs, total)
                elif trains:
                    backward_of(total)
            for number, values in slots.by_branch(logprobs.detach()):
                found[number] = values.double().cpu().numpy()
    return TargetScores(
        logprobs=found,
        losses=losses,
        num_flat_tokens=int(forest.num_branch_tokens),
        num_computed_tokens=num_computed,
    )


def _check_targets(forest: Forest, targets: Sequence[Int64Array], vocab_size: int) -> None:
    if len(targets) != forest.num_branches:
        raise InputError(f"every sequence needs targets, got {len(targets)} for {forest.num_branches} sequences")
    for number, (each, length) in enumerate(zip(targets, forest.branch_length.tolist(), strict=True)):
        if each.ndim not in (1, 2) or each.shape[0] != length or each.size == 0:
            raise InputError(
                f"targets must be [{length}] or [{length}, k] for a sequence of {length} tokens, got "
                f"{list(each.shape)} for sequence {number}"
            )
        if not 0 <= int(each.min()) <= int(each.max()) < vocab_size:
            raise InputError(
                f"targets must be token ids below {vocab_size}, got {each.min()}..{each.max()} for sequence {number}"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Slots:
    """Distinct (state, target) pairs of a unit: a table of E edges, and the indices of each branch's pairs in it."""

    table: EdgeTable
    branches: Int64Array
    indices: list[Int64Array]
    """Index of each target's pair in the table: one array per branch, in the shape of its targets."""

    @classmethod
    def of(cls, unit: Unit, targets: Sequence[Int64Array]) -> "_Slots":
        forest, own = unit.forest, [targets[number] for number in unit.branches]
        paths, offsets = forest.paths()
        per_state = [each.size // each.shape[0] for each in own]
        states = np.repeat(paths.astype(np.int64), np.repeat(per_state, np.diff(offsets)))
        tokens = np.concatenate([each.ravel() for each in own])
        width = int(tokens.max()) + 1
        pairs, index = np.unique(states * width + tokens, return_inverse=True)
        rows, edge_row = np.unique(pairs // width, return_inverse=True)
        table = EdgeTable(
            rows=rows, edges=np.arange(pairs.size), edge_row=edge_row.astype(np.int64), targets=pairs % width
        )
        ends = np.cumsum([each.size for each in own])[:-1]
        indices = [flat.reshape(each.shape) for flat, each in zip(np.split(index, ends), own, strict=True)]
        return cls(table=table, branches=unit.branches, indices=indices)

    def by_branch(self, logprobs: Tensor) -> list[tuple[int, Tensor]]:
        """Return (index of a sequence, log-probs of its targets) for each sequence."""
        indices = [torch.from_numpy(index).to(logprobs.device) for index in self.indices]
        return [(int(number), logprobs[index]) for number, index in zip(self.branches, indices, strict=True)]

    def total(self, logprobs: Tensor, loss: LossOfTargets, losses: list[float]) -> Tensor:
        """Return the loss of the unit, and write the loss of each sequence to `losses`."""
        terms = [(number, loss(number, values)) for number, values in self.by_branch(logprobs)]
        for number, term in terms:
            losses[number] = float(term.detach())
            if not np.isfinite(losses[number]):
                raise StateError(
                    f"the loss of sequence {number} is {losses[number]}; check its values, or start again with a lower "
                    "learning rate"
                )
        return torch.stack([term for _, term in terms]).sum()


def _scores_in_partitions(unit: PartitionedTree, table: EdgeTable, scorer: Scorer) -> Tensor:
    logprobs = scorer.no_scores(table.edges.size).logprobs

    def put(_: int, own: EdgeTable, hidden: Tensor) -> None:
        at = torch.from_numpy(own.edges).to(logprobs.device)
        logprobs[at] = scorer.scores(hidden, unit.forest, own).logprobs.to(logprobs.dtype)

    PartitionedStep(unit, table, scorer).sweep(put)
    return logprobs


def _train_partitions(unit: PartitionedTree, table: EdgeTable, scorer: Scorer, logprobs: Tensor, total: Tensor) -> int:
    """Add the gradients of a partitioned tree whose loss sees whole sequences; return the recomputed tokens."""
    total.backward()  # type: ignore[no-untyped-call]
    vector = torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad
    keeps = choose_parents(scorer.model, chain_tokens=unit.chain_tokens).keeps
    step = PartitionedStep(unit, table, scorer, keeps=keeps)

    def loss_of(_: int, part: EdgeTable) -> LossOf:
        own = vector[torch.from_numpy(part.edges).to(vector.device)]

        def product(at: slice, scores: EdgeScores) -> Tensor:
            return (scores.logprobs * own[at]).sum()

        return product

    step.backward(loss_of)
    return unit.forest.num_tokens + step.num_recomputed
