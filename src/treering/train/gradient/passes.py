"""The units of a step, which of them are scored first, and how many passes ranks in step run."""

from collections.abc import Sequence

import numpy as np

from treering.errors import ConfigError
from treering.train.objectives import Objective
from treering.tree.plan.partition import PartitionedTree
from treering.tree.plan.plan import MicroBatch, Plan

Unit = MicroBatch | PartitionedTree


def units_of(plan: Plan) -> list[Unit]:
    """Micro-batches, then partitioned trees: the order in which a step runs them."""
    return [*plan.micro_batches, *plan.partitioned]


def count_passes(plan: Plan, objective: Objective) -> int:
    """The forwards with a backward of a rank that keeps step with others, which add empty ones.

    Raises:
        ConfigError: a tree in partitions, or a sequence or pair that is not computed in one pass.

    Example: two micro-batches are two passes.
    """
    units = units_of(plan)
    if plan.partitioned or crossing_units(units, objective):
        raise ConfigError(
            f'ranks="sharded" runs as many passes of whole trees on every rank, and here {len(plan.partitioned)} trees '
            f'are cut, or pairs are apart, by max_tokens={plan.max_tokens}: use ranks="gathered", or raise max_tokens'
        )
    return len(units)


def crossing_units(units: Sequence[Unit], objective: Objective) -> list[int]:
    """Units that hold only part of a branch or pair that the objective needs whole."""
    if objective.scope == "entry":
        return []
    crossing = {i for i, unit in enumerate(units) if isinstance(unit, PartitionedTree)}
    if objective.pairs is not None:
        unit_of = np.full(sum(unit.branches.size for unit in units), -1, np.int64)
        for number, unit in enumerate(units):
            unit_of[unit.branches] = number
        sides = unit_of[objective.pairs]
        crossing |= set(sides[sides[:, 0] != sides[:, 1]].ravel().tolist())
        # A unit that shares a pair with a crossing unit crosses too; all other pairs are within their unit.
    return sorted(crossing)


def num_forwards(unit: Unit) -> int:
    """Forwards of a pass over a unit; none for an empty micro-batch."""
    return len(unit.partitions) if isinstance(unit, PartitionedTree) else int(unit.forest.num_tokens > 0)
