"""The forwards and backwards of a step in the order in which they run, for ranks that must all run the same."""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from treering.ranks.agreement import Passes
from treering.ranks.setup import RanksMode
from treering.train.gradient.activations import ParentsOption
from treering.train.gradient.router_losses import RouterLosses
from treering.train.objectives import Objective
from treering.tree.plan.partition import PartitionedTree
from treering.tree.plan.plan import MicroBatch, Plan

Unit = MicroBatch | PartitionedTree
Event = tuple[Literal["enter", "leave"], int]


def pass_order(
    plan: Plan,
    objective: Objective,
    *,
    parents: ParentsOption,
    router_losses: RouterLosses | None,
    ranks: RanksMode | None,
) -> Passes:
    """The passes of one rank, and what all ranks must have in common besides.

    Args:
        plan: of the rank.
        objective: of the step.
        parents: as in `backward`; ranks in step take "auto" for "keep".
        router_losses: of the step; a balance loss counts what routers choose in passes without gradients.
        ranks: how ranks keep step; they run the same passes, so that no unit is left out, if they are "sharded". Else
            the order is empty.

    Example: two micro-batches and no balance loss are ("train", "train"), and empty ones may follow.
    """
    what = f"{objective.name} with ranks={ranks!r} and router_losses={router_losses}"
    if ranks != "sharded":
        return Passes(what)
    counts_load = router_losses is not None and router_losses.balance > 0
    units: list[Unit] = [*plan.micro_batches, *plan.partitioned]
    crossing = crossing_units(units, objective)
    scored = [*crossing, *(i for i in range(len(units)) if counts_load and i not in crossing)]
    order = ["score"] * sum(num_forwards(units[i]) for i in scored)
    for unit in units:
        order += _of_tree(unit, parents) if isinstance(unit, PartitionedTree) else ["train"]
    can_pad = not crossing and not plan.partitioned
    # Padded passes are scored too where load is counted, so their number is that of the others.
    return Passes(what, tuple(word for word in order if word == "train") if can_pad else tuple(order), can_pad)


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


def depth_first(children: Sequence[Sequence[int]]) -> Iterator[Event]:
    """Partitions from the first one on: one is entered before and left after all partitions below it.

    Example: a partition with one child gives enter 0, enter 1, leave 1, leave 0.
    """
    stack: list[Event] = [("leave", 0), ("enter", 0)]
    while stack:
        event, number = stack.pop()
        yield event, number
        if event == "enter":
            stack += [step for child in reversed(children[number]) for step in (("leave", child), ("enter", child))]


def _of_tree(tree: PartitionedTree, parents: ParentsOption) -> list[str]:
    children: list[list[int]] = [[] for _ in tree.partitions]
    for number, partition in enumerate(tree.partitions):
        if partition.parent >= 0:
            children[partition.parent].append(number)
    words = []
    for event, number in depth_first(children):
        is_dropped = bool(children[number]) and parents == "recompute"
        if event == "enter":
            words.append("score" if is_dropped else "forward")
        else:
            words += ["forward", "backward"] if is_dropped else ["backward"]
    return words
