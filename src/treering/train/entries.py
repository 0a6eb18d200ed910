"""The optimizer batch as flat entries: one weight and one set of values for each token of each branch.

Per-branch arguments (masks, advantages, old log-probs) come as lists, arrays or tensors; errors name the wrong branch
and token. Mask, sharing convention and normaliser become one factor per entry, computed over the whole batch before any
forward. So splitting into micro-batches and partitions does not change the loss.

    K branches through all forests, forests in order, then sequences   F flat entries: every token of every branch,
    branches one after another
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.arrays import BoolArray, Float64Array, Int64Array
from treering.errors import InputError
from treering.train.objective import BranchValue, BranchValues, Objective, Shared, Weighting
from treering.tree.forest import Forest

_TINY = 1e-150
"""Replacement for a zero denominator, whose numerator is 0 too; its square is above the smallest float64."""

SumOverRanks = Callable[[Float64Array], Float64Array]
"""Sum an array over data-parallel ranks; the identity on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchEntries:
    """Per-entry data of K branches, before ranks exchange their denominators.

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
        """Return the trained entries of `branches`, which must be the branches of `forest` in its order."""
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
    """Flat entries with their factors in the loss.

    Attributes:
        weights: [F] factor of an entry's term in the loss.
        pairs: int64 [P, 2] compared branches; None for objectives without pairs.
        pair_weight: factor of a pair's term in the loss: 1 / (pairs of all ranks).
    """

    weights: Float64Array
    pairs: Int64Array | None
    pair_weight: float

    def local_pairs(self, branches: Int64Array) -> Int64Array:
        """Return the pairs whose branches are both in `branches`, as indices into it."""
        assert self.pairs is not None
        local_branch = np.full(self.branch_tree.size, -1, np.int64)
        local_branch[branches] = np.arange(branches.size)
        local = local_branch[self.pairs]
        return local[(local >= 0).all(1)]


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
        """Return which tokens of the branches' forest at least one entry trains: bool [N]."""
        wanted = np.zeros(forest.num_tokens, bool)
        wanted[self.edges] = True
        return wanted

    def only(self, chosen: BoolArray | Int64Array) -> "Selection":
        """Return a selection with only the chosen entries, and the same branches."""
        return Selection(
            branches=self.branches,
            edges=self.edges[chosen],
            entries=self.entries[chosen],
            branch=self.branch[chosen],
        )

    def split(self, owner: Int64Array, num_owners: int) -> "list[Selection]":
        """Split the entries by owner, int64 [E], such as the partition of each."""
        order = np.argsort(owner, kind="stable")
        bounds = np.searchsorted(owner[order], np.arange(1, num_owners))
        return [self.only(chosen) for chosen in np.split(order, bounds)]

    @classmethod
    def joined(cls, parts: Sequence["Selection"], num_edges: Sequence[int]) -> "Selection":
        """Join selections of several forests; edges of a forest are offset by `num_edges` of those before it."""
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
    """Return the entries of an objective over forests.

    Raises:
        InputError: per-branch values or pairs that do not fit the branches.
    """
    empty = np.zeros(0, np.int64)
    branch_length = np.concatenate([empty, *(forest.branch_length for forest in forests)])
    tree_offsets = np.cumsum([0, *(forest.num_trees for forest in forests)])
    branch_tree = [forest.branch_tree + first for forest, first in zip(forests, tree_offsets, strict=False)]
    _check_pairs(objective, branch_length.size)
    masks = [np.ones(length, bool) for length in branch_length]
    if objective.loss_masks is not None:
        masks = as_masks(objective.loss_masks, branch_length)
    counts = entry_counts(forests, masks, objective.weighting.shared)
    _check_images(forests, counts)
    return BatchEntries(
        offsets=np.concatenate([[0], np.cumsum(branch_length)]).astype(np.int64),
        branch_tree=np.concatenate([empty, *branch_tree]),
        counts=counts,
        values={
            name: flatten(
                name,
                items,
                branch_length,
                trained=counts > 0,
                numbers="refuse" if name in objective.per_token else "spread",
            )
            for name, items in objective.values.items()
        },
    )


def flatten_batch(entries: BatchEntries, objective: Objective, sum_over_ranks: SumOverRanks) -> FlatBatch:
    """Return the flat batch of an objective, with denominators over all ranks."""
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


def entry_counts(forests: Sequence[Forest], masks: Sequence[BoolArray], shared: Shared) -> Float64Array:
    """Return the count of each entry: 0 if not trained, 1 under `sum`, 1 / (branches that train the edge) under `once`.

    Args:
        forests: forests with K branches in all.
        masks: K masks, one entry per token; the first entry of a sequence has no edge and is ignored.
        shared: the sharing convention.

    Returns:
        float64 [F].

    Example: branches [5, 6, 7] and [5, 6, 8] trained from the second token on: `sum` gives 0 1 1 0 1 1, `once` gives
    0 .5 1 0 .5 1.
    """
    counts = []
    first = 0
    for forest in forests:
        indices, offsets = forest.paths()
        trained = np.concatenate([np.zeros(0, bool), *masks[first : first + forest.num_branches]]).astype(np.float64)
        trained[offsets[:-1]] = 0.0
        if shared == "once":
            num_trainers = np.bincount(indices, weights=trained, minlength=forest.num_tokens)
            trained /= np.maximum(num_trainers[indices], 1.0)
        counts.append(trained)
        first += forest.num_branches
    return np.concatenate([np.zeros(0), *counts])


def entry_weights(
    counts: Float64Array,
    *,
    branch_length: Int64Array,
    branch_tree: Int64Array,
    weighting: Weighting,
    sum_over_ranks: SumOverRanks,
) -> Float64Array:
    """Return the factor of each entry's term in the loss: `counts` over the normaliser's denominator.

    Args:
        counts: float64 [F], see `entry_counts`.
        branch_length: int64 [K], tokens of each branch; sums to F.
        branch_tree: int64 [K], index of each branch's tree, counted through all forests.
        weighting: normaliser and its divisor.
        sum_over_ranks: sums denominators over all ranks.

    Returns:
        float64 [F]; all zero if nothing is trained.
    """
    num_trees = np.unique(branch_tree).size
    totals = sum_over_ranks(np.array([counts.sum(), branch_length.size, num_trees], np.float64))
    num_entries, num_branches, num_trees_everywhere = np.maximum(totals, _TINY)
    factor: Float64Array  # [K], the same for all entries of a branch
    match weighting.normalizer:
        case "sum":
            factor = np.ones(branch_length.size)
        case "constant":
            assert weighting.divisor is not None
            factor = np.full(branch_length.size, 1.0 / weighting.divisor)
        case "token_mean":
            factor = np.full(branch_length.size, 1.0 / num_entries)
        case "sequence_mean":
            branch = np.repeat(np.arange(branch_length.size), branch_length)
            per_branch = np.bincount(branch, weights=counts, minlength=branch_length.size)
            factor = 1.0 / (np.maximum(per_branch, _TINY) * num_branches)
        case "sequence_sum":
            factor = np.full(branch_length.size, 1.0 / num_branches)
        case "tree_mean":
            tree_size = np.bincount(branch_tree, minlength=1)[branch_tree]
            factor = 1.0 / (tree_size * num_trees_everywhere)
    weights: Float64Array = counts * np.repeat(factor, branch_length)
    return weights


def as_masks(masks: BranchValues, branch_length: NDArray[np.int64]) -> list[NDArray[np.bool_]]:
    """Convert K masks of 0 and 1 to booleans.

    Raises:
        InputError: the number of masks, the length of a mask, or an entry is wrong.

    Example: masks [[0, 1], [1]] of branches of 2 and 1 tokens are [False, True] and [True].
    """
    _check_count("loss_masks", masks, branch_length)
    return [_as_mask(i, mask, int(branch_length[i])) for i, mask in enumerate(masks)]


def flatten(
    name: str,
    items: BranchValues,
    branch_length: NDArray[np.int64],
    *,
    trained: NDArray[np.bool_],
    numbers: Literal["spread", "refuse"] = "spread",
) -> NDArray[np.float64]:
    """Spread one item per branch (one number, or one number per token) over entries: float64 [F].

    Args:
        name: name of the list in errors.
        items: K items.
        branch_length: int64 [K].
        trained: bool [F]; untrained values may be anything, including NaN.
        numbers: "spread" repeats a single number over its branch, "refuse" raises.

    Raises:
        InputError: a list or an item of the wrong length, or a trained value that is not finite.

    Example: items 2.0 and [7.0, 8.0] of branches of 3 and 2 tokens are 2, 2, 2, 7, 8.
    """
    _check_count(name, items, branch_length)
    parts = [np.zeros(0)]
    for branch, item in enumerate(items):
        array = _as_array(f"{name}[{branch}]", item).astype(np.float64, copy=False)
        length = int(branch_length[branch])
        if numbers == "refuse" and array.ndim == 0:
            raise InputError(
                f"{name}[{branch}] needs a list with one number per token ({length}), got the number {array}"
            )
        if array.shape not in ((), (length,)):
            raise InputError(f"{name}[{branch}] needs one number, or one per token ({length}), got shape {array.shape}")
        parts.append(array if array.ndim else np.full(length, array))
    flat = np.concatenate(parts)
    _check_values(name, flat, trained, branch_length, ~np.isfinite(flat), "must be finite")
    if name.endswith("logprobs"):
        # Rounding gives at most a few hundredths; a probability of a sampled token is often above a half.
        rule = "must be log-probabilities, so at most 0,"
        _check_values(name, flat, trained, branch_length, flat > 0.5, rule)
    return flat


def split_totals(name: str, items: BranchValues) -> tuple[list[BranchValue], list[BranchValue]]:
    """Split items, each a total of its branch or one number per token, into (per-token items, totals).

    An item is 0 in the other list.

    Raises:
        InputError: not a list, or a total that is not finite.

    Example: items -3.0 and [-1.0, -2.0] are the per-token items [0.0, [-1.0, -2.0]] and the totals [-3.0, 0.0].
    """
    _check_list(name, items)
    arrays = [_as_array(f"{name}[{branch}]", item) for branch, item in enumerate(items)]
    for branch, array in enumerate(arrays):
        if array.ndim == 0 and not np.isfinite(array):
            raise InputError(f"{name}[{branch}] must be finite, got {array}")
    per_token: list[BranchValue] = [array if array.ndim else 0.0 for array in arrays]
    totals: list[BranchValue] = [0.0 if array.ndim else float(array) for array in arrays]
    return per_token, totals


def _check_images(forests: Sequence[Forest], counts: Float64Array) -> None:
    """Refuse masks that train placeholder tokens of images."""
    start = 0
    for forest in forests:
        stop = start + forest.num_branch_tokens
        if forest.images:
            indices, offsets = forest.paths()
            wrong = np.flatnonzero((forest.tokens[indices] < 0) & (counts[start:stop] > 0))
            if wrong.size:
                branch = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
                raise InputError(
                    f"loss_masks must be False at image tokens, and token {int(wrong[0] - offsets[branch])} of "
                    f"sequence {branch} of its forest is one; a model is never trained to write images"
                )
        start = stop


def _check_pairs(objective: Objective, num_branches: int) -> None:
    pairs = objective.pairs
    if pairs is None or pairs.size == 0 or pairs.max() < num_branches:
        return
    at = int(np.flatnonzero((pairs >= num_branches).any(1))[0])
    raise InputError(
        f"pair {at} of {objective.name} names branch {int(pairs[at].max())}, and branches count from 0 to "
        f"{num_branches - 1} over all forests; correct it"
    )


def _as_mask(branch: int, mask: BranchValue, length: int) -> NDArray[np.bool_]:
    array = _as_array(f"loss mask {branch}", mask)
    if array.shape != (length,):
        raise InputError(f"loss mask {branch} needs one entry per token ({length}), got shape {array.shape}")
    is_binary = (array == 0) | (array == 1)
    if not is_binary.all():
        raise InputError(f"loss mask {branch} must hold 0 and 1 only, got {array[~is_binary][0]}")
    return array.astype(bool)


def _as_array(name: str, value: BranchValue) -> NDArray[Any]:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", torch.float64).numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InputError(f"{name} must be a number or a flat list of numbers, got a ragged list ({error})") from error
    if array.dtype.kind not in "biuf":
        raise InputError(f"{name} must be a number or a flat list of numbers, got {array.dtype}")
    return array


def _check_list(name: str, items: object) -> int:
    try:
        return len(items)  # type: ignore[arg-type]
    except TypeError as error:
        raise InputError(f"{name} must be a list with one item per branch, got {type(items).__name__}") from error


def _check_count(name: str, items: object, branch_length: NDArray[np.int64]) -> None:
    count = _check_list(name, items)
    if count != branch_length.size:
        raise InputError(
            f"{name} needs one item per branch, forests in order, then sequences: "
            f"got {count} for {branch_length.size} branches"
        )


def _check_values(
    name: str,
    values: NDArray[np.float64],
    trained: NDArray[np.bool_],
    branch_length: NDArray[np.int64],
    is_bad: NDArray[np.bool_],
    rule: str,
) -> None:
    bad = np.flatnonzero(trained & is_bad)
    if bad.size:
        ends = np.cumsum(branch_length)
        branch = int(np.searchsorted(ends, bad[0], side="right"))
        at = int(bad[0] - ends[branch] + branch_length[branch])
        raise InputError(f"{name}[{branch}] {rule} where a token is trained, got {values[bad[0]]} at token {at}")
