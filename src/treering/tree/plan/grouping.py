"""Labelled runs to partitions: parts that hang off one partition are joined as far as the budget allows.

Works from the top down, because what hangs off a partition depends on what was put into it.

    R runs   Q components (connected runs of one label)   P partitions
"""

from collections.abc import Sequence
from typing import NamedTuple, get_args

from treering.tree.plan.bins import pack
from treering.tree.plan.cutting import Policy, Run, cut_runs


class Grouping(NamedTuple):
    """Partitions in order of discovery: parents before children."""

    partition: list[int]  # [R] of each run
    parent: list[int]  # [P] partition above, -1 for the top one
    size: list[int]  # [P] tokens

    @property
    def cost(self) -> tuple[int, int]:
        """The number of partitions, and the tokens of the longest chain of them, from the top one down."""
        depth: list[int] = []
        for above, size in zip(self.parent, self.size, strict=True):
            depth.append(size + (depth[above] if above >= 0 else 0))
        return len(self.parent), max(depth)


class _Component(NamedTuple):
    parent: int
    label: int


def group_runs(runs: Sequence[Run], budget: int) -> Grouping:
    """Joins runs into partitions of at most `budget` tokens.

    Example: three leaves of 4 tokens that hang off one partition make two partitions under a budget of 8.
    """
    of_run, components, size = _components(runs)
    children: list[list[int]] = [[] for _ in components]
    for child, component in enumerate(components[1:], 1):
        children[component.parent].append(child)
    members: list[list[int]] = [[0]]
    parent = [-1]
    for number, own in enumerate(members):
        hanging = [child for member in own for child in children[member]]
        joined = _put_together(hanging, components, size, budget)
        # More partitions, which this loop reaches later.
        members += joined
        parent += [number] * len(joined)
    partition = [0] * len(components)
    for number, own in enumerate(members):
        for member in own:
            partition[member] = number
    totals = [sum(size[member] for member in own) for own in members]
    return Grouping([partition[component] for component in of_run], parent, totals)


def _components(runs: Sequence[Run]) -> tuple[list[int], list[_Component], list[int]]:
    """Component of each run, and the components in packed order with their sizes."""
    of_run: list[int] = []
    components: list[_Component] = []
    size: list[int] = []
    for run in runs:
        if run.above >= 0 and runs[run.above].label == run.label:
            of_run.append(of_run[run.above])
        else:
            components.append(_Component(of_run[run.above] if run.above >= 0 else -1, run.label))
            of_run.append(len(size))
            size.append(0)
        size[of_run[-1]] += run.stop - run.start
    return of_run, components, size


def _put_together(
    hanging: Sequence[int], components: Sequence[_Component], size: Sequence[int], budget: int
) -> list[list[int]]:
    """Components by bin; those of one label were cut to fit one bin and stay in it together."""
    by_label: dict[int, list[int]] = {}
    for component in hanging:
        by_label.setdefault(components[component].label, []).append(component)
    labels = sorted(by_label)
    bins = pack([sum(size[component] for component in by_label[label]) for label in labels], budget)
    joined: list[list[int]] = [[] for _ in range(max(bins, default=-1) + 1)]
    bin_of_label = dict(zip(labels, bins, strict=True))
    for component in hanging:
        joined[bin_of_label[components[component].label]].append(component)
    return joined


def search_cuts(
    start: Sequence[int], parent: Sequence[int], num_tokens: int, budget: int, wholes: Sequence[tuple[int, int]] = ()
) -> tuple[list[Run], Grouping]:
    """The best grouping over both policies, each with no forced cuts and with those of `_beside_trunk`.

    Best means the fewest partitions, then the shortest longest chain of them, then the first that was tried. `wholes`
    are never cut; see `cut_runs`.
    """
    found: list[tuple[list[Run], Grouping]] = []
    for is_cut in ([False] * len(start), _beside_trunk(start, parent, num_tokens, budget)):
        for policy in get_args(Policy):
            runs = cut_runs(start, parent, num_tokens, budget, policy, is_cut, wholes)
            found.append((runs, group_runs(runs, budget)))
    return min(found, key=lambda one: one[1].cost)


def _beside_trunk(start: Sequence[int], parent: Sequence[int], num_tokens: int, budget: int) -> list[bool]:
    """The segments that fit with all below them, and hang off one that does not.

    What is kept while they are computed is then the trunk alone, and no sibling.

    Example: a prompt of 1,024 tokens with 32 responses of 1,024 and a budget of 8,192: the responses.
    """
    size = [stop - first for first, stop in zip(start, [*start[1:], num_tokens], strict=True)]
    for segment in reversed(range(1, len(start))):
        size[parent[segment]] += size[segment]
    return [False, *(size[i] <= budget < size[parent[i]] for i in range(1, len(start)))]
