"""The optimizer batch as flat entries: one weight and one set of values for every token of every branch.

Built once per step, before any forward, so splitting into micro-batches and partitions does not change the loss.

    K branches through all forests   F flat entries: every token of every branch, branches one after another
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treering.arrays import BoolArray, Float64Array, Int64Array
from treering.errors import InputError
from treering.train.loss_weights import SumOverRanks, entry_counts, entry_weights
from treering.train.objectives import Objective
from treering.tree.forest import Forest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchEntries:
    """Per-entry data of K branches, before any rank has told its denominators.

    Attributes:
        offsets: int64 [K + 1]; branch i owns entries offsets[i] to offsets[i + 1].
        branch_tree: int64 [K], see `entry_weights`.
        counts: [F] weight of an entry in averages, 0 if it is not trained.
        values: [F] each, the objective's own data.
    """

    offsets: Int64Array
    branch_tree: Int64Array
    counts: Float64Array
    values: Mapping[str, Float64Array]

    @property
    def num_trained(self) -> float:
        """Sum of the counts."""
        return float(self.counts.sum())

    def select(self, forest: Forest, branches: Int64Array) -> "Selection":
        """The trained entries of `branches`, which are the branches of `forest` in its order."""
        edges, _ = forest.paths()
        spans = [np.arange(self.offsets[i], self.offsets[i + 1]) for i in branches]
        entries = np.concatenate([np.zeros(0, np.int64), *spans])
        branch = np.repeat(np.arange(branches.size), np.diff(self.offsets)[branches])
        trained = self.counts[entries] > 0
        return Selection(
            branches=branches, edges=edges[trained].astype(np.int64), entries=entries[trained], branch=branch[trained]
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatBatch(BatchEntries):
    """Entries with their factors in the loss.

    Attributes:
        weights: [F] factor of an entry's term in the loss.
        pairs: int64 [P, 2] compared branches, None for objectives without pairs.
        pair_weight: factor of a pair's term in the loss: 1 / pairs of all ranks.
    """

    weights: Float64Array
    pairs: Int64Array | None
    pair_weight: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """Trained entries of some branches.

    Attributes:
        branches: int64 [B] their indices in the batch.
        edges: int64 [E] packed index of each entry's token in the forest of these branches.
        entries: int64 [E] indices of the entries in the batch.
        branch: int64 [E] index of each entry's branch in `branches`, ascending.
    """

    branches: Int64Array
    edges: Int64Array
    entries: Int64Array
    branch: Int64Array

    def wanted(self, forest: Forest) -> BoolArray:
        """Which tokens of the branches' forest some entry trains: bool [N]."""
        wanted = np.zeros(forest.num_tokens, bool)
        wanted[self.edges] = True
        return wanted

    def only(self, chosen: BoolArray | Int64Array) -> "Selection":
        """Some of the entries, of the same branches."""
        return Selection(
            branches=self.branches,
            edges=self.edges[chosen],
            entries=self.entries[chosen],
            branch=self.branch[chosen],
        )

    def split(self, owner: Int64Array, num_owners: int) -> "list[Selection]":
        """The entries by owner, int64 [E], such as a partition."""
        order = np.argsort(owner, kind="stable")
        bounds = np.searchsorted(owner[order], np.arange(1, num_owners))
        return [self.only(chosen) for chosen in np.split(order, bounds)]

    @classmethod
    def joined(cls, parts: Sequence["Selection"], num_edges: Sequence[int]) -> "Selection":
        """Selections of several forests as one; edges count on through forests of `num_edges` tokens each."""
        first_edge = np.cumsum([0, *num_edges])
        first_branch = np.cumsum([0, *(part.branches.size for part in parts)])
        nothing = np.zeros(0, np.int64)
        return cls(
            branches=np.concatenate([nothing, *(part.branches for part in parts)]),
            edges=np.concatenate([nothing, *(p.edges + first for p, first in zip(parts, first_edge, strict=False))]),
            entries=np.concatenate([nothing, *(part.entries for part in parts)]),
            branch=np.concatenate(
                [nothing, *(p.branch + first for p, first in zip(parts, first_branch, strict=False))]
            ),
        )


def read_entries(forests: Sequence[Forest], objective: Objective) -> BatchEntries:
    """The entries of an objective over forests.

    Raises:
        InputError: per-branch values or pairs that do not fit the branches.
    """
    empty = np.zeros(0, np.int64)
    branch_length = np.concatenate([empty, *(forest.branch_length for forest in forests)])
    tree_offsets = np.cumsum([0, *(forest.num_trees for forest in forests)])
    branch_tree = [forest.branch_tree + first for forest, first in zip(forests, tree_offsets, strict=False)]
    _check_pairs(objective, branch_length.size)
    counts = entry_counts(forests, objective.masks(branch_length), objective.weighting.shared)
    _check_pictures(forests, counts)
    return BatchEntries(
        offsets=np.concatenate([[0], np.cumsum(branch_length)]).astype(np.int64),
        branch_tree=np.concatenate([empty, *branch_tree]),
        counts=counts,
        values=objective.flat_values(branch_length, trained=counts > 0),
    )


def flatten_batch(entries: BatchEntries, objective: Objective, sum_over_ranks: SumOverRanks) -> FlatBatch:
    """The flat batch of an objective; denominators cover all ranks."""
    weights = entry_weights(
        entries.counts,
        branch_length=np.diff(entries.offsets),
        branch_tree=entries.branch_tree,
        weighting=objective.weighting,
        sum_over_ranks=sum_over_ranks,
    )
    num_pairs = 0.0 if objective.pairs is None else float(sum_over_ranks(np.array([len(objective.pairs)], float))[0])
    return FlatBatch(
        offsets=entries.offsets,
        branch_tree=entries.branch_tree,
        counts=entries.counts,
        values=entries.values,
        weights=weights,
        pairs=objective.pairs,
        pair_weight=1.0 / max(num_pairs, 1.0),
    )


def _check_pictures(forests: Sequence[Forest], counts: Float64Array) -> None:
    """Refuses masks that train placeholders of pictures."""
    start = 0
    for forest in forests:
        stop = start + forest.num_branch_tokens
        if forest.pictures:
            indices, offsets = forest.paths()
            wrong = np.flatnonzero((forest.tokens[indices] < 0) & (counts[start:stop] > 0))
            if wrong.size:
                branch = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
                raise InputError(
                    f"token {int(wrong[0] - offsets[branch])} of sequence {branch} of its forest stands for a picture, "
                    "and the loss would train it: a model is never trained to write pictures; give loss_masks that are "
                    "False there"
                )
        start = stop


def _check_pairs(objective: Objective, num_branches: int) -> None:
    pairs = objective.pairs
    if pairs is None or pairs.size == 0 or pairs.max() < num_branches:
        return
    at = int(np.flatnonzero((pairs >= num_branches).any(1))[0])
    raise InputError(
        f"pair {at} of {objective.name} names branch {int(pairs[at].max())}, and there are {num_branches} branches, "
        "numbered from 0, forests in order, then sequences"
    )
