"""How far a plan is from the best there could be: sharing that is possible, planned and achieved, and both bounds.

Counts only; no clock. What the seconds were is for the caller to compare with the FLOP bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treering.errors import InputError
from treering.tree.forest import Forest
from treering.tree.plan.plan import Plan
from treering.tree.stats import Bounds, Work, flat_work, tree_work, work_bounds
from treering.types import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Shares are 1 - computed / flat tokens; bounds are best possible speedups over separate branches.

    Attributes:
        possible_sharing: if all branches of the batch were merged, across the given forests too.
        planned_sharing: of the plan.
        achieved_sharing: of the plan with what was computed more than once; equal to planned if nothing was.
        token_bound, flop_bound: speedups at the possible sharing.
        token_speedup, flop_speedup: the same counts for what is achieved; recomputed tokens count as forwards alone, a
            third of a token's FLOPs.
    """

    possible_sharing: float
    planned_sharing: float
    achieved_sharing: float
    token_bound: float
    flop_bound: float
    token_speedup: float
    flop_speedup: float

    @property
    def share_of_token_bound(self) -> float:
        """Achieved over possible speedup by tokens, at most 1."""
        return self.token_speedup / self.token_bound

    @property
    def share_of_flop_bound(self) -> float:
        """Achieved over possible speedup by FLOPs, at most 1."""
        return self.flop_speedup / self.flop_bound

    def in_words(self) -> str:
        """Two lines for a log."""
        return (
            f"sharing: {self.possible_sharing:.3f} possible, {self.planned_sharing:.3f} planned, "
            f"{self.achieved_sharing:.3f} achieved\n"
            f"speedup by tokens {self.token_speedup:.2f} of {self.token_bound:.2f} "
            f"({self.share_of_token_bound:.0%}), by FLOPs {self.flop_speedup:.2f} of {self.flop_bound:.2f} "
            f"({self.share_of_flop_bound:.0%})"
        )


def report_plan(
    forests: Sequence[Forest], plan: Plan, shape: ModelShape, *, num_recomputed_tokens: int = 0
) -> PlanReport:
    """The report of a plan for `forests`.

    Args:
        forests: what `plan` was made from.
        plan: the plan.
        shape: the model whose FLOPs are counted.
        num_recomputed_tokens: run forward once more, as `BackwardResult.num_recomputed_tokens`.

    Raises:
        InputError: a negative number of tokens, or a plan of other forests.

    Example: `[5, 6, 7]` and `[5, 6, 8]` as two forests have possible sharing 1/3, planned and achieved 0.
    """
    if num_recomputed_tokens < 0:
        raise InputError(f"num_recomputed_tokens counts tokens and must be >= 0, got {num_recomputed_tokens}")
    lengths = np.concatenate([np.empty(0, np.int64), *(forest.branch_length for forest in forests)])
    flat = flat_work(lengths)
    if flat.num_tokens != plan.num_branch_tokens:
        raise InputError(
            f"a plan is reported with the forests that it was made from: it has {plan.num_branch_tokens:,} flat "
            f"tokens, they have {flat.num_tokens:,}; pass the same forests"
        )
    planned = tree_work(plan.forests)
    possible = tree_work([_merged(forests)])
    best, reached = work_bounds(flat, possible, shape), _bounds(flat, planned, shape, num_recomputed_tokens)
    return PlanReport(
        possible_sharing=_sharing(possible.num_tokens, flat.num_tokens),
        planned_sharing=plan.sharing,
        achieved_sharing=_sharing(planned.num_tokens + num_recomputed_tokens, flat.num_tokens),
        token_bound=best.token_bound,
        flop_bound=best.flop_bound,
        token_speedup=reached.token_bound,
        flop_speedup=reached.flop_bound,
    )


def _merged(forests: Sequence[Forest]) -> Forest:
    """All branches of all forests in one."""
    if len(forests) == 1:
        return forests[0]
    sequences = []
    for forest in forests:
        indices, offsets = forest.paths()
        sequences.extend(np.split(forest.tokens[indices], offsets[1:-1]) if forest.num_branches else [])
    return Forest.from_sequences(sequences)


def _bounds(flat: Work, planned: Work, shape: ModelShape, num_recomputed_tokens: int) -> Bounds:
    if planned.num_tokens == 0:
        return Bounds(token_bound=1.0, flop_bound=1.0)
    bounds = work_bounds(flat, planned, shape)
    again = num_recomputed_tokens / planned.num_tokens
    return Bounds(token_bound=bounds.token_bound / (1 + again), flop_bound=bounds.flop_bound / (1 + again / 3))


def _sharing(num_tokens: int, num_flat_tokens: int) -> float:
    return 1.0 - num_tokens / num_flat_tokens if num_flat_tokens else 0.0
