"""The teacher's distributions of the states of a forest: of any source, and those that are given per branch.

R states   K branches   F flat entries   k tokens per state
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from treering.arrays import Float64Array, Int64Array
from treering.errors import InputError
from treering.model.distillation.teacher import TeacherRows, TeacherTopK
from treering.model.edges import EdgeTable
from treering.train.gradient.flat_batch import Selection
from treering.train.objective import GivenScores
from treering.tree.forest import Forest

MAX_TOTAL = 1.001
"""Most that the probabilities of a state's k tokens may sum to; rounding in bfloat16 stays below."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetRows:
    """The teacher's distributions of some states of a forest.

    Attributes:
        states: int64 [R], packed indices, ascending.
        rows: of these states.
    """

    states: Int64Array
    rows: TeacherRows

    def of(self, forest: Forest, table: EdgeTable) -> TeacherRows:
        """The distributions of a table's rows, in their order; its edges are packed indices of `forest`."""
        first = np.searchsorted(table.edge_row, np.arange(table.rows.size))
        return self.rows.take(torch.from_numpy(np.searchsorted(self.states, forest.parent[table.edges[first]])))


class GivenTargets:
    """The given scores of K branches as those of states.

    Example: branches [5, 6, 7] and [5, 6, 8] have one state after 6, for which both must give the same scores.
    """

    def __init__(self, scores: Sequence[GivenScores], branch_length: Int64Array, num_logits: int) -> None:
        """Raises InputError for scores of another number of branches or tokens."""
        if len(scores) != branch_length.size:
            raise InputError(f"a teacher scores every branch, got scores of {len(scores)} for {branch_length.size}")
        for branch, (ids, _) in enumerate(scores):
            if ids.shape[0] != branch_length[branch]:
                raise InputError(
                    f"teacher scores of branch {branch} have one row per token ({branch_length[branch]}), got "
                    f"{ids.shape[0]}"
                )
        width = scores[0][0].shape[1] if scores else 1
        if width >= num_logits:
            raise InputError(f"a teacher gives fewer tokens per state than the vocabulary of {num_logits}, got {width}")
        self._num_logits = num_logits
        self._ids = np.concatenate([np.zeros((0, width), np.int64), *(ids for ids, _ in scores)])
        self._logprobs = np.concatenate([np.zeros((0, width)), *(logprobs for _, logprobs in scores)])
        self._offsets = np.cumsum([0, *branch_length])

    def targets(self, forest: Forest, selected: Selection) -> TargetRows:
        """The scores of the states before the selected entries' tokens.

        Raises:
            InputError: scores that are no distribution, or that differ between branches that share a state.
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
                f"branches that share tokens have one teacher there: {self._named(int(selected.entries[at]))} and "
                f"{self._named(int(entries[state_of[at]]))} follow the same tokens with different scores; score each "
                "distinct token once, as treering.score does"
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
            (foreign.any(1), f"token ids lie in the student's vocabulary of {self._num_logits}"),
            (twice, "each token id occurs once per state"),
            (~fine, "log-probs are finite and their probabilities sum to 1 at most"),
        ):
            if bad.any():
                at = int(np.flatnonzero(bad)[0])
                raise InputError(
                    f"teacher scores: {rule}, got ids {ids[at].tolist()} with log-probs {logprobs[at].tolist()} at "
                    f"{self._named(int(entries[at]))}; is this the teacher's own tokenizer and its full softmax?"
                )

    def _named(self, entry: int) -> str:
        branch = int(np.searchsorted(self._offsets, entry, side="right")) - 1
        return f"branch {branch}, token {entry - int(self._offsets[branch])}"
