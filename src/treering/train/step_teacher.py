"""Teacher of a step: its distributions at the states of a unit, computed by a model or given per branch.

N tokens   R states   K branches   F flat entries   k tokens per state
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from treering.arrays import BoolArray, Float64Array, Int64Array
from treering.attention.layout import to_device
from treering.errors import InputError
from treering.model.checks import check_whole
from treering.model.context import is_active, tree_attention
from treering.model.divergence import Divergence
from treering.model.edges import EdgeTable, edge_table
from treering.model.forward import check_forest, hidden_states, without_gradients
from treering.model.teacher import TargetRows, TeacherTopK, check_top_k, states_of
from treering.model.tree_model import TreeModel
from treering.train.entries import BatchEntries, Selection
from treering.train.objective import Distillation, GivenScores
from treering.train.partitioned import PartitionedStep
from treering.train.scorer import Scorer
from treering.tree.forest import Forest
from treering.tree.partition import PartitionedTree
from treering.tree.plan import Unit

MAX_TOTAL = 1.001
"""Upper bound on the summed probability of a state's k tokens; rounding in bfloat16 stays below it."""


class GivenTargets:
    """Given scores of K branches, looked up by state.

    Example: branches [5, 6, 7] and [5, 6, 8] share the state after 6, so both must give the same scores there.
    """

    def __init__(self, scores: Sequence[GivenScores], branch_length: Int64Array, num_logits: int) -> None:
        """Raise InputError if the scores do not fit the number of branches or their tokens."""
        if len(scores) != branch_length.size:
            raise InputError(f"a teacher must score every branch, got scores of {len(scores)} for {branch_length.size}")
        for branch, (ids, _) in enumerate(scores):
            if ids.shape[0] != branch_length[branch]:
                raise InputError(
                    f"teacher scores of branch {branch} need one row per token ({branch_length[branch]}), got "
                    f"{ids.shape[0]}"
                )
        width = scores[0][0].shape[1] if scores else 1
        if width >= num_logits:
            raise InputError(
                f"a teacher must give fewer tokens per state than its vocabulary ({num_logits}), got {width}"
            )
        self._num_logits = num_logits
        self._ids = np.concatenate([np.zeros((0, width), np.int64), *(ids for ids, _ in scores)])
        self._logprobs = np.concatenate([np.zeros((0, width)), *(logprobs for _, logprobs in scores)])
        self._offsets = np.cumsum([0, *branch_length])

    def targets(self, forest: Forest, selected: Selection) -> TargetRows:
        """Return the scores of the states before the selected entries' tokens.

        Raises:
            InputError: scores that are not a distribution, or that differ between branches that share a state.
        """
        parents = forest.parent[selected.edges].astype(np.int64)
        states, first, state_of = np.unique(parents, return_index=True, return_inverse=True)
        entries = selected.entries[first]
        ids, logprobs = self._ids[entries], self._logprobs[entries]
        differs = (self._ids[selected.entries] != ids[state_of]) | (
            self._logprobs[selected.entries] != logprobs[state_of]
        )
        if differs.any():
            at = int(np.flatnonzero(differs.any(1))[0])
            raise InputError(
                "a teacher must give branches the same scores where they share tokens, and "
                f"{self._named(int(selected.entries[at]))} differs from {self._named(int(entries[state_of[at]]))}; "
                "score each distinct token once, as treering.score does"
            )
        self._check(entries, ids, logprobs)
        return TargetRows(
            states=states, rows=TeacherTopK(ids=torch.from_numpy(ids), logprobs=torch.from_numpy(logprobs))
        )

    def _check(self, entries: Int64Array, ids: Int64Array, logprobs: Float64Array) -> None:
        ordered = np.sort(ids, 1)
        foreign = (ids < 0) | (ids >= self._num_logits)
        twice = (ordered[:, 1:] == ordered[:, :-1]).any(1)
        with np.errstate(over="ignore", invalid="ignore"):
            fine = (np.exp(logprobs).sum(1) <= MAX_TOTAL) & np.isfinite(logprobs).all(1)
        for bad, rule in (
            (foreign.any(1), f"token ids must lie in the student's vocabulary of {self._num_logits}"),
            (twice, "each token id may occur once per state"),
            (~fine, "log-probs must be finite and their probabilities sum to at most 1"),
        ):
            if bad.any():
                at = int(np.flatnonzero(bad)[0])
                raise InputError(
                    f"teacher scores: {rule}, got ids {ids[at].tolist()} with log-probs {logprobs[at].tolist()} at "
                    f"{self._named(int(entries[at]))}; check that they come from the same tokenizer and a full softmax"
                )

    def _named(self, entry: int) -> str:
        branch = int(np.searchsorted(self._offsets, entry, side="right")) - 1
        return f"branch {branch}, token {entry - int(self._offsets[branch])}"


def bound_teacher(
    distillation: Distillation | None, *, student: TreeModel, forests: Sequence[Forest]
) -> TreeModel | None:
    """Return the teacher if it is a model, else None.

    Raises:
        InputError: the teacher's vocabulary is not the student's, or lacks a token of the forests.
        ConfigError: `top_k` is not below the size of the vocabulary.
        UnsupportedError: a model whose scores would not be exact.
    """
    if distillation is None or not isinstance(distillation.teacher, nn.Module):
        return None
    bound = TreeModel.of(distillation.teacher)
    check_whole(bound, "a teacher")
    if bound.num_logits != student.num_logits:
        raise InputError(
            f"a teacher must share the student's tokenizer, and its head has {bound.num_logits} tokens where the "
            f"student's has {student.num_logits}; use a teacher with the same vocabulary"
        )
    for forest in forests:
        check_forest(forest.without_routes(), bound)
    check_top_k(distillation.top_k, bound)
    return without_gradients(bound, forests)


class StepTeacher:
    """Teacher of a step: a model or given scores.

    Attributes:
        divergence: divergence from the teacher, at its temperature.
    """

    def __init__(
        self,
        distillation: Distillation,
        *,
        student: TreeModel,
        forests: Sequence[Forest],
        temperature: float,
        backend: str,
    ) -> None:
        """Bind a teacher; `temperature` is the step's, `backend` the attention backend of a teacher that is a model.

        Raises:
            InputError: given scores that do not fit the number of branches or their tokens; see also `bound_teacher`.
        """
        own = distillation.temperature
        self.divergence = Divergence(
            kind=distillation.kind, beta=distillation.beta, temperature=temperature if own is None else own
        )
        self._top_k = distillation.top_k
        self._backend = backend
        self._model = bound_teacher(distillation, student=student, forests=forests)
        self._given = None
        if not isinstance(distillation.teacher, nn.Module):
            lengths = np.concatenate([np.zeros(0, np.int64), *(forest.branch_length for forest in forests)])
            self._given = GivenTargets(distillation.teacher, lengths, student.num_logits)

    def active(self) -> AbstractContextManager[object]:
        """Enter `tree_attention` for a teacher that is a model, unless the caller is inside it already.

        Raises:
            UnsupportedError: a teacher in training mode with dropout.
        """
        if self._model is None or is_active(self._model):
            return nullcontext()
        return tree_attention(self._model, self._backend)

    def check(self, units: Sequence[Unit], entries: BatchEntries) -> None:
        """Check given scores before the first gradient; a model has none to check.

        Raises:
            InputError: see `GivenTargets.targets`.
        """
        if self._given is not None:
            for unit in units:
                self._given.targets(unit.forest, entries.select(unit.forest, unit.branches))

    def targets(self, unit: Unit, selected: Selection) -> TargetRows:
        """Return the distributions at the states before the selected tokens; at least one token must be selected."""
        if self._given is not None:
            return self._given.targets(unit.forest, selected)
        assert self._model is not None
        # A teacher chooses its own experts.
        unit = replace(unit, forest=unit.forest.without_routes())
        wanted = selected.wanted(unit.forest)
        if isinstance(unit, PartitionedTree):
            states, hidden = _states_of_partitions(self._model, unit, wanted)
        else:
            states, hidden = _states_of_forest(self._model, unit.forest, wanted)
        rows = states_of(self._model, hidden)
        top_k, temperature = self._top_k, self.divergence.temperature
        return TargetRows(states=states, rows=rows if top_k is None else rows.top(top_k, temperature))


def _states_of_forest(model: TreeModel, forest: Forest, wanted: BoolArray) -> tuple[Int64Array, Tensor]:
    """Return the states before the wanted tokens, int64 [R], and the teacher's hidden states there, no gradients."""
    states = edge_table(forest, wanted).rows
    with torch.no_grad():
        hidden = hidden_states(model, forest)
        return states, hidden[to_device(states, hidden.device)]


def _states_of_partitions(model: TreeModel, unit: PartitionedTree, wanted: BoolArray) -> tuple[Int64Array, Tensor]:
    """Return the same as `_states_of_forest`, computed in the student's partitions."""
    scorer = Scorer(model=model)
    states: list[Int64Array] = []
    hidden: list[Tensor] = []

    def collect(number: int, table: EdgeTable, own: Tensor) -> None:
        states.append(unit.partitions[number].tokens[table.rows].astype(np.int64))
        hidden.append(own[to_device(table.rows, own.device)])

    PartitionedStep(unit, edge_table(unit.forest, wanted), scorer).sweep(collect)
    order = np.argsort(np.concatenate(states))
    return np.concatenate(states)[order], torch.cat(hidden)[to_device(order, scorer.device)]
