"""The teacher of a step: computes its distributions for one unit at a time, on the unit's own forest.

N tokens   R states
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from treering.arrays import BoolArray, Int64Array
from treering.attention.to_device import to_device
from treering.errors import InputError
from treering.model.checks import check_whole
from treering.model.context import is_active, tree_attention
from treering.model.distillation.divergence import Divergence
from treering.model.distillation.teacher import check_top_k, states_of
from treering.model.edges import EdgeTable, edge_table
from treering.model.families import ModelParts, find_parts
from treering.model.forward import check_forest, hidden_states, without_gradients
from treering.train.gradient.flat_batch import BatchEntries, Selection
from treering.train.gradient.partitioned import PartitionedStep
from treering.train.gradient.passes import Unit
from treering.train.gradient.scoring import Scorer
from treering.train.gradient.targets import GivenTargets, TargetRows
from treering.train.objective import Distillation
from treering.tree.forest import Forest
from treering.tree.plan.partition import PartitionedTree


def teacher_parts(
    distillation: Distillation | None, *, student: ModelParts, forests: Sequence[Forest]
) -> ModelParts | None:
    """The parts of a teacher that is a model; None for one that is not.

    Raises:
        InputError: its vocabulary is not the student's, or lacks a token of the forests.
        ConfigError: `top_k` is not below it.
        UnsupportedError: a model that would not be exact.
    """
    if distillation is None or not isinstance(distillation.teacher, nn.Module):
        return None
    parts = find_parts(distillation.teacher)
    check_whole(parts, "a teacher")
    if parts.num_logits != student.num_logits:
        raise InputError(
            f"a teacher shares the student's tokenizer, and its head has {parts.num_logits} tokens where the student's "
            f"has {student.num_logits}; take a teacher of the same vocabulary"
        )
    for forest in forests:
        check_forest(forest, parts)
    check_top_k(distillation.top_k, parts)
    return without_gradients(parts, forests)


@contextmanager
def teaching(distillation: Distillation | None, parts: ModelParts | None, backend: str) -> Iterator[None]:
    """Enters `tree_attention` of a teacher that is a model, unless the caller has; `parts` from `teacher_parts`.

    Raises:
        UnsupportedError: a teacher in training mode with dropout.
    """
    if distillation is None or parts is None or is_active(parts):
        yield
        return
    assert isinstance(distillation.teacher, nn.Module)
    with tree_attention(distillation.teacher, backend):
        yield


class StepTeacher:
    """A teacher that is a model or given scores.

    Attributes:
        divergence: from it, at its temperature.
    """

    def __init__(
        self,
        distillation: Distillation,
        parts: ModelParts | None,
        *,
        student: ModelParts,
        forests: Sequence[Forest],
        temperature: float,
    ) -> None:
        """`parts` from `teacher_parts`; `temperature` is the step's.

        Raises:
            InputError: given scores of another number of branches or tokens.
        """
        own = distillation.temperature
        self.divergence = Divergence(
            kind=distillation.kind, beta=distillation.beta, temperature=temperature if own is None else own
        )
        self._top_k = distillation.top_k
        self._parts = parts
        self._given = None
        if not isinstance(distillation.teacher, nn.Module):
            lengths = np.concatenate([np.zeros(0, np.int64), *(forest.branch_length for forest in forests)])
            self._given = GivenTargets(distillation.teacher, lengths, student.num_logits)

    def check(self, units: Sequence[Unit], entries: BatchEntries) -> None:
        """Checks given scores, before the first gradient; a model has none.

        Raises:
            InputError: see `GivenTargets.targets`.
        """
        if self._given is not None:
            for unit in units:
                self._given.targets(unit.forest, entries.select(unit.forest, unit.branches))

    def targets(self, unit: Unit, selected: Selection) -> TargetRows:
        """The distributions of the states before the selected tokens, of which there is at least one."""
        if self._given is not None:
            return self._given.targets(unit.forest, selected)
        assert self._parts is not None
        wanted = selected.wanted(unit.forest)
        if isinstance(unit, PartitionedTree):
            states, hidden = _states_of_partitions(self._parts, unit, wanted)
        else:
            states, hidden = _states_of_forest(self._parts, unit.forest, wanted)
        rows = states_of(self._parts, hidden)
        top_k, temperature = self._top_k, self.divergence.temperature
        return TargetRows(states=states, rows=rows if top_k is None else rows.top(top_k, temperature))


def _states_of_forest(parts: ModelParts, forest: Forest, wanted: BoolArray) -> tuple[Int64Array, Tensor]:
    """The states before the wanted tokens, int64 [R], and the teacher's hidden states there, without gradients."""
    states = edge_table(forest, wanted).rows
    with torch.no_grad():
        hidden = hidden_states(parts, forest)
        return states, hidden[to_device(states, hidden.device)]


def _states_of_partitions(parts: ModelParts, unit: PartitionedTree, wanted: BoolArray) -> tuple[Int64Array, Tensor]:
    """As `_states_of_forest`, in the partitions of the student."""
    scorer = Scorer(parts=parts, temperature=1.0, entropy_of="none", value_head=None)
    states: list[Int64Array] = []
    hidden: list[Tensor] = []

    def collect(number: int, table: EdgeTable, own: Tensor) -> None:
        states.append(unit.partitions[number].tokens[table.rows].astype(np.int64))
        hidden.append(own[to_device(table.rows, own.device)])

    PartitionedStep(unit, wanted, scorer, "keep").sweep(collect)
    order = np.argsort(np.concatenate(states))
    return np.concatenate(states)[order], torch.cat(hidden)[to_device(order, scorer.device)]
