"""What a sample of trajectories holds: tokens, sharing and bounds, what it is held to, and how much work it is.

All of it counts. Knows nothing of models, clocks or files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.tree.sets import SHAPE, TaskSample
from benchmarks.tree.steps import BASELINES
from treering.train.gradient.backward import plan_step
from treering.train.objectives import sft
from treering.tree.forest import Forest
from treering.tree.stats import branching, flat_work, tree_work, work_bounds
from treering.types import TokenIds

MIN_SHARING = 0.4
MIN_MEAN_SEGMENT = 32.0
"""Sets with that much sharing in segments that long are held to a share of the FLOP bound."""

NUM_RUNS = 3
"""Rounds of a set that is held to something; one of the others, unless the caller says how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetCounts:
    """What a sample holds; all of it counts, no clock."""

    num_tasks: int
    num_tasks_of_set: int
    num_branches: int
    flat_tokens: int
    unique_tokens: int
    trained_tokens: int
    """Tokens with loss, counted by branches."""
    sharing: float
    mean_segment: float
    token_bound: float
    flop_bound: float
    gated: bool
    """Whether the set is held to a share of the FLOP bound: enough sharing, in segments long enough."""


def count(sample: TaskSample) -> SetCounts:
    """Tokens, sharing and bounds of a sample with the model `SHAPE`.

    Example: one task of [5, 6, 7] and [5, 6, 8] has 6 flat and 4 unique tokens, sharing 0.33 and mean segment 1.33.
    """
    forests = [Forest.from_sequences(group) for group in sample.groups]
    lengths = np.array([sequence.size for group in sample.groups for sequence in group])
    flat, tree = flat_work(lengths), tree_work(forests)
    bounds, sharing = work_bounds(flat, tree, SHAPE), 1.0 - tree.num_tokens / flat.num_tokens
    mean_segment = branching(*forests).mean_segment_length
    return SetCounts(
        num_tasks=len(forests),
        num_tasks_of_set=sample.num_tasks_of_set,
        num_branches=lengths.size,
        flat_tokens=flat.num_tokens,
        unique_tokens=tree.num_tokens,
        trained_tokens=sample.num_trained_tokens,
        sharing=sharing,
        mean_segment=mean_segment,
        token_bound=bounds.token_bound,
        flop_bound=bounds.flop_bound,
        gated=sharing >= MIN_SHARING and mean_segment >= MIN_MEAN_SEGMENT,
    )


def default_runs(counts: SetCounts) -> int:
    """Rounds where the caller names none: `NUM_RUNS` for a set that is gated or shares nothing, else one."""
    return NUM_RUNS if counts.gated or counts.sharing == 0.0 else 1


def work_of(counts: SetCounts, num_runs: int) -> int:
    """Tokens that measuring a set computes, if one baseline outlasts the first round."""
    return num_runs * (counts.flat_tokens + counts.unique_tokens) + (len(BASELINES) - 1) * counts.flat_tokens


def tokens_at_peak(groups: Sequence[Sequence[TokenIds]], max_tokens: int) -> int:
    """Tokens whose activations are alive at one time when each group is trained as a tree on CPU, parents kept.

    Example: groups [5, 6, 7] + [5, 6, 8] and [9, 9] are trees of 4 and 2 tokens: 6 under a budget of 6, else 4.
    """
    forests = [Forest.from_sequences(group) for group in groups]
    plan = plan_step(forests, sft(), max_tokens, device=torch.device("cpu"))
    whole = [batch.forest.num_tokens for batch in plan.micro_batches]
    return max([*whole, *(tree.chain_tokens for tree in plan.partitioned)], default=0)
