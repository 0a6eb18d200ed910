"""The interface of a loss: per-branch data, and one pure function from the values of trained entries to terms.

Denominators are in `loss_weights`; the losses are in `objectives`.

    K branches, numbered through all forests in order   F flat entries: trained tokens of branches, one branch after
    another   P pairs of branches
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from treering.train.branch_values import BranchValues, as_masks, flatten
from treering.train.distillation import Distillation
from treering.train.loss_weights import Weighting

Scope = Literal["entry", "branch", "pair"]
"""Which entries the terms need together. entry: none, any subset works. branch: all trained entries of a branch. pair:
those of both branches of a pair."""

Need = Literal["entropy", "value"]
"""What the terms read in addition to log-probs: entropies, or the output of a value head."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entries:
    """The input of a term function: the trained entries of some branches, one after another.

    Attributes:
        logprobs: the policy's log-probabilities [F]; differentiable.
        values: the objective's own per-entry data by name, [F] each.
        branch: local number of each entry's branch, ascending from 0 to `num_branches - 1`; a branch may have no entry.
        num_branches: number of branches.
        entropy: entropy in nats of the distribution that each token was drawn from, [F], differentiable; given iff the
            objective needs "entropy".
        state_values: the value head's output at the state before each token, [F], differentiable; given iff the
            objective needs "value".
        divergence: from the teacher, at the state before each token, [F], differentiable; given iff the objective has a
            `distillation`.
        pairs: local branch numbers [P, 2]; given iff the scope is "pair".
    """

    logprobs: Float[Tensor, " F"]
    values: Mapping[str, Float[Tensor, " F"]]
    branch: Int[Tensor, " F"]
    num_branches: int
    entropy: Float[Tensor, " F"] | None = None
    state_values: Float[Tensor, " F"] | None = None
    divergence: Float[Tensor, " F"] | None = None
    pairs: Int[Tensor, "P 2"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """The output of a term function: one number per entry [F], or per pair [P] if the scope is "pair".

    Attributes:
        loss: the terms of the weighted sum; differentiable.
        metrics: by name; averaged over trained entries, or over pairs.
    """

    loss: Float[Tensor, " N"]
    metrics: Mapping[str, Float[Tensor, " N"]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Objective:
    """A loss over branches; made by the functions of this package.

    Attributes:
        name: of the function that made it.
        weighting: normaliser and sharing convention; ignored for pairs, which are averaged.
        loss_masks: K masks, or None to train every token but the first of each branch.
        values: per-branch data by name: K entries, each one number or one value per token.
        terms: the loss per entry or pair.
        scope: which entries `terms` must see together.
        needs: what `terms` reads in addition to log-probs.
        pairs: branch numbers, int64 [P, 2], if the scope is "pair", else None.
        per_token: names in `values` that need one number per token, not one per branch.
        distillation: the teacher whose divergence the terms read.
        reads_logprobs: False if they read nothing else, which saves a pass through the head.
    """

    name: str
    weighting: Weighting
    terms: Callable[[Entries], Terms]
    loss_masks: BranchValues | None = None
    values: Mapping[str, BranchValues] = field(default_factory=dict)
    scope: Scope = "entry"
    needs: frozenset[Need] = frozenset()
    pairs: NDArray[np.int64] | None = None
    per_token: frozenset[str] = frozenset()
    distillation: Distillation | None = None
    reads_logprobs: bool = True

    def __post_init__(self) -> None:
        assert (self.scope == "pair") == (self.pairs is not None)

    def masks(self, branch_length: NDArray[np.int64]) -> list[NDArray[np.bool_]]:
        """The K loss masks as booleans, checked against the branches' lengths.

        Raises:
            InputError: the number of masks or the length of one is wrong, or an entry is not 0 or 1.
        """
        if self.loss_masks is None:
            return [np.ones(length, bool) for length in branch_length]
        return as_masks(self.loss_masks, branch_length)

    def flat_values(
        self, branch_length: NDArray[np.int64], *, trained: NDArray[np.bool_]
    ) -> dict[str, NDArray[np.float64]]:
        """The per-branch data spread to entries: float64 [F] by name.

        Args:
            branch_length: int64 [K].
            trained: bool [F]; values elsewhere may be anything, including NaN.

        Raises:
            InputError: a list or an item of the wrong length, or a trained value that is not finite.
        """
        return {
            name: flatten(
                name, items, branch_length, trained=trained, numbers="refuse" if name in self.per_token else "spread"
            )
            for name, items in self.values.items()
        }
