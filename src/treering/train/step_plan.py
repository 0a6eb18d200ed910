"""Plan a step: the units that it runs, in order, and which of them hold only part of what the objective needs whole."""

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np
import torch

from treering.errors import ConfigError
from treering.train.objective import Objective
from treering.train.router_losses import RouterFactors
from treering.tree.forest import Forest
from treering.tree.partition import PartitionedTree
from treering.tree.plan import Plan, Unit, plan_batch

FILL_TOKENS = MappingProxyType({"cpu": 2048})
"""Tokens per micro-batch by device, used if `max_tokens` is larger. Smaller trees are combined up to this size, and
larger ones are cut to it if the cut needs no extra pass. On a CPU 2,048 tokens keep every core busy, and larger tensors
are allocated on fresh pages each time: steps with 8,192 tokens took 6 to 25 % longer (8 layers of 512)."""


def plan_step(
    forests: Sequence[Forest],
    objective: Objective,
    max_tokens: int | None,
    *,
    device: torch.device,
    in_step: bool = False,
    router_losses: RouterFactors | None = None,
) -> Plan:
    """Plan the step as `backward` does: `plan_batch` with the fastest number of tokens for the device.

    For ranks that run the same passes (`in_step`), only `max_tokens` counts, because none of their trees may be cut.
    The same holds for a batch with a balance loss that fits into one forward, because one forward needs no counting
    pass.

    Raises:
        InputError: see `plan_batch`.

    Example: under a budget of 16,384 a tree of 5,000 tokens becomes three partitions on CPU, but stays whole for gspo,
    whose partitions would need a pass without gradients.
    """
    fill_tokens = None if max_tokens is None or in_step else FILL_TOKENS.get(device.type)
    num_tokens = sum(forest.num_tokens for forest in forests)
    if router_losses is not None and router_losses.balance and num_tokens <= (max_tokens or 0):
        fill_tokens = None
    return plan_batch(
        forests,
        max_tokens,
        fill_tokens=fill_tokens,
        cut_tokens=fill_tokens if objective.scope == "entry" else None,
    )


def num_forwards(unit: Unit) -> int:
    """Return the number of forwards in a pass over a unit; 0 for an empty micro-batch."""
    return len(unit.partitions) if isinstance(unit, PartitionedTree) else int(unit.forest.num_tokens > 0)


def count_passes(plan: Plan, objective: Objective) -> int:
    """Count the forwards with a backward of a rank in step with others; ranks with fewer add empty ones.

    Raises:
        ConfigError: a tree in partitions, or a sequence or pair that is not computed in one pass.
    """
    if plan.partitioned or crossing_units(plan.units, objective):
        num_cut = len(plan.partitioned)
        raise ConfigError(
            f'ranks="sharded" needs whole trees and pairs, and max_tokens={plan.max_tokens} '
            f"{f'cuts {num_cut} of the trees' if num_cut else 'puts the branches of a pair into two micro-batches'}; "
            'set ranks="gathered", or raise max_tokens'
        )
    return len(plan.units)


def crossing_units(units: Sequence[Unit], objective: Objective) -> list[int]:
    """Return the indices of units that hold only part of a branch or pair that the objective needs whole."""
    if objective.scope == "entry":
        return []
    crossing = {i for i, unit in enumerate(units) if isinstance(unit, PartitionedTree)}
    if objective.pairs is not None:
        unit_of = np.full(sum(unit.branches.size for unit in units), -1, np.int64)
        for number, unit in enumerate(units):
            unit_of[unit.branches] = number
        sides = unit_of[objective.pairs]
        crossing |= set(sides[sides[:, 0] != sides[:, 1]].ravel().tolist())
        # A unit that shares a pair with a crossing unit crosses too; all other pairs lie within their unit.
    return sorted(crossing)
