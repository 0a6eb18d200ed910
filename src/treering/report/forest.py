"""The drawing of a group's forest: segments as rectangles over the rows of their branches, and its bounds."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from treering.arrays import Int64Array
from treering.data import Trajectory
from treering.report.rollouts import tokens_of
from treering.tree.forest import Forest
from treering.tree.stats import flat_work, tree_work, work_bounds
from treering.types import ModelShape


class Bars(NamedTuple):
    """Where the tokens of a forest are drawn: over the rows of their branches."""

    rows: list[int]
    """The branch of each row; branches that share most are neighbours."""
    rectangles: list[tuple[int, int, int, int]]
    """First token in the forest, number of tokens, first row, and one past the last row; parents before children."""


def place_bars(forest: Forest, cuts: Int64Array | None = None) -> Bars:
    """Lays a forest out, with a bar for each segment.

    Args:
        forest: of one group or episode.
        cuts: tokens at which a bar of its own begins; None: none.
    """
    rows = np.argsort(forest.branch_end, kind="stable")
    ends = forest.branch_end[rows]
    # A rollout may end inside a segment, as a prefix of others: the rest is a bar of its own.
    starts = np.union1d(forest.segment_start, ends[ends + 1 < forest.num_tokens] + 1)
    starts = starts if cuts is None else np.union1d(starts, cuts)
    lengths = np.diff(starts, append=forest.num_tokens)
    tops = np.searchsorted(ends, starts)
    bottoms = np.searchsorted(ends, forest.subtree_end[starts])
    columns = (starts.tolist(), lengths.tolist(), tops.tolist(), bottoms.tolist())
    return Bars(rows.tolist(), list(zip(*columns, strict=True)))


def draw(group: Sequence[Trajectory]) -> dict[str, Any]:
    """The forest of a group as the page draws it: segments over the rows of their branches.

    Returns:
        "rows", the rollout of each row; "segments", each with the depth of its first token, its tokens, its first row,
        one past its last row, and the mean advantage of its branches, None if none has one; "rewards" and "advantages"
        by rollout; "num_tokens", distinct, and "num_branch_tokens".

    Example: [5, 6, 7] and [5, 6, 8, 9] are a segment of 2 tokens over both rows, and one of 1 and one of 2 tokens at
    depth 2, each in its own row.
    """
    forest = Forest.from_sequences([tokens_of(each) for each in group])
    bars = place_bars(forest)
    advantages = [mean_advantage(each) for each in group]
    return {
        "rows": bars.rows,
        "segments": [
            [
                int(forest.position[start]),
                num_tokens,
                top,
                bottom,
                _mean([advantages[row] for row in bars.rows[top:bottom]]),
            ]
            for start, num_tokens, top, bottom in bars.rectangles
        ],
        "rewards": [each.reward for each in group],
        "advantages": advantages,
        "num_tokens": forest.num_tokens,
        "num_branch_tokens": forest.num_branch_tokens,
    }


def mean_advantage(trajectory: Trajectory) -> float | None:
    """Its advantage; the mean over trained tokens where they have different ones; None if it has none."""
    if trajectory.advantages is None:
        return trajectory.advantage
    mask = trajectory.loss_mask
    values = trajectory.advantages if mask is None else trajectory.advantages[mask]
    return float(values.mean()) if values.size else 0.0


def bounds_of(groups: Sequence[Sequence[Trajectory]], shape: ModelShape) -> dict[str, float]:
    """Best possible speedups of training the groups whose rewards differ as trees, by tokens and by counted FLOPs.

    Example: a prompt of 1,024 tokens with 8 responses of 64 has a token bound of 5.67.
    """
    trained = [group for group in groups if any(mean_advantage(each) for each in group)]
    forests = [Forest.from_sequences([tokens_of(each) for each in group]) for group in trained]
    flat = flat_work(np.array([tokens_of(each).size for group in trained for each in group], np.int64))
    found = work_bounds(flat, tree_work(forests), shape)
    return {"token_bound": found.token_bound, "flop_bound": found.flop_bound}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
