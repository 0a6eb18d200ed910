"""Labelled runs to partitions: parts that hang off one partition are joined as far as the budget allows.

Works from the top down, because what hangs off a partition depends on what was put into it.

    R runs   Q components (connected runs of one label)   P partitions
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from treering.arrays import BoolArray, Int64Array
from treering.tree.plan.bins import pack, stable_order
from treering.tree.plan.cutting import Runs, cut_runs


class Grouping(NamedTuple):
    """Partitions in order of discovery: parents before children."""

    partition: Int64Array  # [R] of each run
    parent: Int64Array  # [P] partition above, -1 for the top one
    size: Int64Array  # [P] tokens
    chain: int  # tokens of the longest chain of partitions, from the top one down


@njit(cache=True, nogil=True)
def group_runs(runs: Runs, budget: int) -> Grouping:
    """Joins runs into partitions of at most `budget` tokens.

    Example: three leaves of 4 tokens that hang off one partition make two partitions under a budget of 8.
    """
    component, parent, size, label = _components(runs)
    order, first = _by_parent(parent)
    num_components = size.size
    queue = np.empty(num_components, np.int64)  # components, those of one partition together
    bounds = np.empty(num_components + 1, np.int64)  # of each partition in the queue
    above = np.empty(num_components, np.int64)
    queue[0], above[0] = 0, -1
    bounds[0], bounds[1] = 0, 1
    num_queued, num_partitions, at = 1, 1, 0
    while at < num_partitions:
        members = queue[bounds[at] : bounds[at + 1]]
        hanging = _hanging(members, order, first)
        bins = _put_together(label[hanging], size[hanging], budget)
        by_bin = stable_order(bins)
        for i in range(hanging.size):
            if i == 0 or bins[by_bin[i]] != bins[by_bin[i - 1]]:
                above[num_partitions] = at
                num_partitions += 1
            queue[num_queued] = hanging[by_bin[i]]
            num_queued += 1
            bounds[num_partitions] = num_queued
        at += 1
    partition = np.empty(num_components, np.int64)
    totals = np.zeros(num_partitions, np.int64)
    for i in range(num_partitions):
        for member in queue[bounds[i] : bounds[i + 1]]:
            partition[member] = i
            totals[i] += size[member]
    return Grouping(partition[component], above[:num_partitions].copy(), totals, _longest_chain(above, totals))


@njit(cache=True, nogil=True)
def _components(runs: Runs) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Component of each run, and the parent, size and label of each component; components in packed order."""
    component = np.empty(runs.start.size, np.int64)
    parent = np.empty(runs.start.size, np.int64)
    size = np.zeros(runs.start.size, np.int64)
    label = np.empty(runs.start.size, np.int64)
    num_components = 0
    for i in range(runs.start.size):
        above = runs.above[i]
        if above >= 0 and runs.label[above] == runs.label[i]:
            component[i] = component[above]
        else:
            component[i] = num_components
            parent[num_components] = component[above] if above >= 0 else -1
            label[num_components] = runs.label[i]
            num_components += 1
        size[component[i]] += runs.stop[i] - runs.start[i]
    return component, parent[:num_components], size[:num_components], label[:num_components]


@njit(cache=True, nogil=True)
def _by_parent(parent: Int64Array) -> tuple[Int64Array, Int64Array]:
    """All components but the first, sorted by parent, and where each parent's begin: [Q - 1] and [Q + 1]."""
    first = np.zeros(parent.size + 1, np.int64)
    for above in parent[1:]:
        first[above + 1] += 1
    return stable_order(parent)[1:], np.cumsum(first)


@njit(cache=True, nogil=True)
def _hanging(members: Int64Array, order: Int64Array, first: Int64Array) -> Int64Array:
    """Components that hang off any of the members."""
    count = 0
    for member in members:
        count += first[member + 1] - first[member]
    found = np.empty(count, np.int64)
    at = 0
    for member in members:
        for child in order[first[member] : first[member + 1]]:
            found[at] = child
            at += 1
    return found


@njit(cache=True, nogil=True)
def _put_together(label: Int64Array, size: Int64Array, budget: int) -> Int64Array:
    """Bin of each component; those of one label were cut to fit one bin and stay in it together."""
    by_label = stable_order(label)
    item = np.empty(label.size, np.int64)
    totals = np.zeros(label.size, np.int64)
    num_items = 0
    for i in range(label.size):
        if i > 0 and label[by_label[i]] != label[by_label[i - 1]]:
            num_items += 1
        item[by_label[i]] = num_items
        totals[num_items] += size[by_label[i]]
    bins: Int64Array = pack(totals[: min(label.size, num_items + 1)], budget)
    return bins[item]


@njit(cache=True, nogil=True)
def _longest_chain(parent: Int64Array, size: Int64Array) -> int:
    depth = size.copy()
    for i in range(1, size.size):
        depth[i] += depth[parent[i]]
    return int(depth.max())


@njit(cache=True, nogil=True)
def search_cuts(
    start: Int64Array, parent: Int64Array, num_tokens: int, budget: int, num_choices: int
) -> tuple[Runs, Grouping]:
    """The best grouping over both policies and every set of forced cuts: none, `_beside_trunk`, small trees' choices.

    Small trees try all sets among the segments 1 to `num_choices`. Best means the fewest partitions, then the shortest
    longest chain of them, then the first set.
    """
    is_cut = np.zeros(start.size, np.bool_)
    runs = cut_runs(start, parent, num_tokens, budget, 0, is_cut)
    best = group_runs(runs, budget)
    for choice in range((1 << num_choices) + 1):
        for i in range(num_choices):
            is_cut[i + 1] = choice >> i & 1 == 1
        if choice == 1 << num_choices:
            is_cut = _beside_trunk(start, parent, num_tokens, budget)
        for policy in range(2):
            tried = cut_runs(start, parent, num_tokens, budget, policy, is_cut)
            found = group_runs(tried, budget)
            if (found.parent.size, found.chain) < (best.parent.size, best.chain):
                runs, best = tried, found
    return runs, best


@njit(cache=True, nogil=True)
def _beside_trunk(start: Int64Array, parent: Int64Array, num_tokens: int, budget: int) -> BoolArray:
    """The segments that fit with all below them, and hang off one that does not.

    What is kept while they are computed is then the trunk alone, and no sibling.

    Example: a prompt of 1,024 tokens with 32 responses of 1,024 and a budget of 8,192: the responses.
    """
    size = np.append(start[1:], num_tokens) - start
    for segment in range(start.size - 1, 0, -1):
        size[parent[segment]] += size[segment]
    is_cut = size <= budget
    for segment in range(1, start.size):
        is_cut[segment] &= size[parent[segment]] > budget
    is_cut[0] = False
    return is_cut
