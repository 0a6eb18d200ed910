"""Loss weights: mask, sharing convention and normaliser folded into one number per (branch, token).

Every factor and divisor of a loss is computed here, over the whole optimizer batch, before any forward, so the number
of micro-batches does not change the loss.

    K branches   F flat entries: every token of every branch, branches one after another   T trees
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from treering.arrays import BoolArray, Float64Array, Int64Array
from treering.errors import ConfigError
from treering.tree.forest import Forest

Normalizer = Literal["token_mean", "sequence_mean", "sequence_sum", "tree_mean", "constant", "sum"]
Shared = Literal["sum", "once"]

_TINY = 1e-150
"""Replaces a zero denominator, whose numerator is 0 too; its square is above the smallest float64."""

SumOverRanks = Callable[[Float64Array], Float64Array]
"""Sums an array over data-parallel ranks; the identity on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """How terms are combined into a loss.

    Attributes:
        normalizer: token_mean: sum over trained entries / their number. sequence_mean: the mean over a branch's trained
            entries, then the mean over all branches. sequence_sum: summed in a branch, then the mean over all branches.
            tree_mean: summed in a branch, 1/K inside a tree, then the mean over trees. constant: sum / divisor. sum:
            sum.
        shared: "sum" equals training every branch separately; "once" counts a shared token once: its term is the mean
            over the branches whose mask includes it, and counts as one entry in every denominator.
        divisor: of the constant normaliser, else None.
    """

    normalizer: Normalizer
    shared: Shared = "sum"
    divisor: float | None = None

    def __post_init__(self) -> None:
        if self.normalizer not in get_args(Normalizer):
            raise ConfigError(f"unknown normalizer {self.normalizer!r}: choose {', '.join(get_args(Normalizer))}")
        if self.shared not in get_args(Shared):
            raise ConfigError(f"unknown sharing convention {self.shared!r}: choose {', '.join(get_args(Shared))}")
        if (self.normalizer == "constant") != (self.divisor is not None):
            raise ConfigError(
                f"divisor belongs to normalizer 'constant' and only to it, got {self.normalizer!r} and {self.divisor}"
            )
        if self.divisor is not None and not (isinstance(self.divisor, int | float) and 0 < self.divisor < np.inf):
            raise ConfigError(f"divisor must be a positive number, got {self.divisor!r}")


def entry_counts(forests: Sequence[Forest], masks: Sequence[BoolArray], shared: Shared) -> Float64Array:
    """The count of each entry: 0 if not trained, 1 under `sum`, 1 / (branches that train the edge) under `once`.

    Args:
        forests: in order; K branches in all.
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
    """The factor of each entry's term in the loss: `counts` over the normaliser's denominator.

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
