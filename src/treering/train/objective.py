"""Interface of a loss: per-branch data, and a pure function from the values of trained entries to loss terms.

The losses are in `objectives`; `entries` computes the weight of each term.

    K branches, numbered through all forests in order   F flat entries: trained tokens of branches, one branch after
    another   P pairs of branches   T tokens of a branch   k tokens per state
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from treering.errors import ConfigError, InputError
from treering.model.divergence import DivergenceKind

Number = bool | int | float
BranchValue = Number | Sequence[Number] | NDArray[Any] | Tensor
"""Value of one branch: a number, or one number per token."""

BranchValues = Sequence[BranchValue] | NDArray[Any] | Tensor
"""One item per branch: forests in order, then sequences."""

Normalizer = Literal["token_mean", "sequence_mean", "sequence_sum", "tree_mean", "constant", "sum"]
Shared = Literal["sum", "once"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """How terms are combined into a loss.

    Attributes:
        normalizer: token_mean: sum over trained entries / their number. sequence_mean: mean over a branch's trained
            entries, then mean over all branches. sequence_sum: sum over a branch, then mean over all branches.
            tree_mean: sum over a branch, 1/K inside a tree, then mean over trees. constant: sum / divisor. sum: plain
            sum.
        shared: "sum" equals training every branch separately. "once" counts a shared token once: its term is the mean
            over the branches whose mask includes it, and is one entry in every denominator.
        divisor: divisor of the constant normaliser, else None.
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
                f"divisor must be set if and only if normalizer is 'constant', got {self.normalizer!r} and "
                f"{self.divisor}"
            )
        if self.divisor is not None and not (isinstance(self.divisor, int | float) and 0 < self.divisor < np.inf):
            raise ConfigError(f"divisor must be a positive number, got {self.divisor!r}")


GivenScores = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Token ids and log-probs of one branch, [T, k] each: entry t holds the distribution that token t was drawn from."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distillation:
    """Teacher, and how the student is compared with it.

    Attributes:
        teacher: a model, or the scores of K branches.
        kind: kind of the divergence.
        beta: see `Divergence`.
        temperature: temperature of the divergence; None uses the step's.
        top_k: number of likeliest tokens per state that the teacher gives; None uses its whole vocabulary.
    """

    teacher: nn.Module | tuple[GivenScores, ...]
    kind: DivergenceKind
    beta: float
    temperature: float | None
    top_k: int | None


def as_given_scores(items: Sequence[Any]) -> tuple[GivenScores, ...]:
    """Convert the scores of K branches to arrays, and check each of them.

    Raises:
        InputError: an item that is not a pair of arrays [T, k] of one shape, or whose k is not that of the first item.

    Example: the item ([[0, 0], [7, 8]], [[0, 0], [-0.1, -3.0]]) gives token 1 the id 7 with probability 0.905.
    """
    scores = tuple(_as_pair(branch, item) for branch, item in enumerate(items))
    widths = [ids.shape[1] for ids, _ in scores]
    for branch, width in enumerate(widths):
        if width != widths[0]:
            raise InputError(
                f"a teacher must give the same number of tokens for all branches, got {width} for branch {branch} and "
                f"{widths[0]} for branch 0; cut them to one top k"
            )
    return scores


def _as_pair(branch: int, item: Any) -> GivenScores:
    try:
        ids, logprobs = item
    except (TypeError, ValueError) as error:
        raise InputError(
            f"teacher scores of branch {branch} must be a pair (ids, log-probs), got {type(item).__name__}; see "
            "treering.score(...).of_branches"
        ) from error
    arrays = [value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value for value in (ids, logprobs)]
    pair = np.asarray(arrays[0], np.int64), np.asarray(arrays[1], np.float64)
    if pair[0].ndim != 2 or pair[0].shape != pair[1].shape or pair[0].shape[1] == 0:
        raise InputError(
            f"teacher scores of branch {branch} must be ids and log-probs [tokens, k] of one shape, got "
            f"{pair[0].shape} and {pair[1].shape}"
        )
    return pair


def branch_sums(values: Float[Tensor, " F"], branch: Int[Tensor, " F"], num_branches: int) -> Float[Tensor, " B"]:
    """Return the sum of each branch's values, 0 where it has none; differentiable.

    Example: values [1, 2, 5] of branches [0, 0, 2] of 3 are [3, 0, 5].
    """
    return torch.zeros(num_branches, dtype=values.dtype, device=values.device).index_add(0, branch, values)


def branch_sizes(branch: Int[Tensor, " F"], num_branches: int, *, like: Tensor) -> Float[Tensor, " B"]:
    """Return the number of entries of each branch, in the dtype of `like`.

    Example: branches [0, 0, 2] of 3 have [2, 0, 1] entries.
    """
    return branch_sums(torch.ones(branch.shape, dtype=like.dtype, device=like.device), branch, num_branches)


Scope = Literal["entry", "branch", "pair"]
"""Entries the terms need together. entry: none, any subset works. branch: all trained entries of a branch. pair: all
trained entries of both branches of a pair."""

Need = Literal["entropy", "value"]
"""Inputs of the terms in addition to log-probs: entropies, or the output of a value head."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entries:
    """Input of a term function: the trained entries of some branches, one after another.

    Attributes:
        logprobs: the policy's log-probabilities [F]; differentiable.
        values: the objective's own per-entry data by name, [F] each.
        branch: local number of each entry's branch, ascending from 0 to `num_branches - 1`; a branch may have no entry.
        num_branches: number of branches.
        entropy: entropy in nats of the distribution that each token was drawn from, [F], differentiable; given iff the
            objective needs "entropy".
        state_values: the value head's output at the state before each token, [F], differentiable; given iff the
            objective needs "value".
        divergence: divergence from the teacher at the state before each token, [F], differentiable; given iff the
            objective has a `distillation`.
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
    """Output of a term function: one number per entry [F], or per pair [P] if the scope is "pair".

    Attributes:
        loss: the terms of the weighted sum; differentiable.
        metrics: metrics by name; averaged over trained entries, or over pairs.
    """

    loss: Float[Tensor, " N"]
    metrics: Mapping[str, Float[Tensor, " N"]]


def checked_terms(name: str, terms: object, logprobs: Tensor, count: int) -> Terms:
    """Return the output of the term function of the objective `name`, which must have `count` numbers of the log-probs.

    Raises:
        InputError: the output is something else. A mean over entries would otherwise be weighted once per entry, and a
            detached loss would train nothing.
    """
    if not isinstance(terms, Terms):
        raise InputError(
            f"the loss of {name!r} must return objectives.Terms(loss=..., metrics=...), got {type(terms).__name__}"
        )
    if terms.loss.shape != (count,):
        raise InputError(
            f"the loss of {name!r} must have one number for each of its {count} entries or pairs, got shape "
            f"{tuple(terms.loss.shape)}; leave sums and means to the normalizer"
        )
    if logprobs.requires_grad and not terms.loss.requires_grad:
        raise InputError(f"the loss of {name!r} has no gradient; compute it from entries.logprobs, not detached")
    return terms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Objective:
    """Loss over branches; made by the functions of `treering.objectives`.

    Attributes:
        name: name of the function that made it.
        weighting: normaliser and sharing convention; ignored for pairs, which are averaged.
        loss_masks: K masks, or None to train every token but the first of each branch.
        values: per-branch data by name: K entries, each one number or one value per token.
        terms: the loss per entry or pair.
        scope: which entries `terms` must see together.
        needs: what `terms` reads in addition to log-probs.
        pairs: branch numbers, int64 [P, 2], if the scope is "pair", else None.
        per_token: names in `values` that need one number per token, not one per branch.
        distillation: the teacher whose divergence the terms read.
        reads_logprobs: False if the terms read nothing but the divergence, which saves a pass through the head.
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
