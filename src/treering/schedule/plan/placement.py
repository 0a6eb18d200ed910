"""Assigns ranked rollouts to groups or workers.

N rollouts, G groups or workers
"""

import numpy as np
from numpy.typing import NDArray

from treering.compile_once import compiled_once
from treering.schedule.simulator.heaps import sink


def longest_first(lengths: NDArray[np.float64], prompts: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """int64 [N]: rollouts by falling length.

    Among equal lengths, the first rollouts of all prompts come first, then the second ones: without history, each
    prompt is probed before more of its group starts. Without prompts equal lengths keep their order.

    Example: lengths [5, 9, 5] give [1, 0, 2]; four equal ones of the prompts [0, 0, 1, 1] give [0, 2, 1, 3].
    """
    if prompts is None:
        return np.argsort(-lengths, kind="stable")
    return np.lexsort((_numbers_in_groups(prompts), -lengths))


def _numbers_in_groups(prompts: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [N]: how many rollouts of its prompt come before each."""
    order = np.argsort(prompts, kind="stable")
    starts = np.flatnonzero(np.diff(prompts[order], prepend=prompts[order[0]] - 1))
    numbers = np.empty(prompts.size, np.int64)
    numbers[order] = np.arange(prompts.size) - np.repeat(starts, np.diff(starts, append=prompts.size))
    return numbers


def equal_counts(order: NDArray[np.int64], num_groups: int) -> NDArray[np.int64]:
    """int64 [N]: group of each rollout, groups of equal size along an order of all rollouts.

    Example: the order [1, 0, 2, 3] in two groups is [0, 0, 1, 1] by rollout: 1 and 0 first, 2 and 3 then.
    """
    groups = np.empty(order.size, np.int64)
    groups[order] = np.arange(order.size) * num_groups // order.size
    return groups


def equal_sums(order: NDArray[np.int64], lengths: NDArray[np.float64], num_groups: int) -> NDArray[np.int64]:
    """int64 [N]: group of each rollout, groups with equal token sums along an order of all rollouts.

    Example: lengths [6, 2, 2, 2] in their own order and two groups are [0, 1, 1, 1].
    """
    middles = np.cumsum(lengths[order]) - lengths[order] / 2
    groups = np.empty(order.size, np.int64)
    groups[order] = np.minimum((middles / lengths.sum() * num_groups).astype(np.int64), num_groups - 1)
    return groups


@compiled_once()
def balanced(order: NDArray[np.int64], lengths: NDArray[np.float64], num_workers: int) -> NDArray[np.int64]:
    """int64 [N]: for each position in the order, the worker with the fewest tokens so far; the lowest on ties.

    With the longest first this is the rule of Graham (1969), at most 4/3 - 1/(3 G) of the best split.

    Example: lengths [5, 4, 3, 2] in that order on two workers: [0, 1, 1, 0].
    """
    # A heap of the workers by load: the first entry is the next worker.
    loads, workers = np.zeros(num_workers), np.arange(num_workers)
    found = np.empty(order.size, np.int64)
    for place in range(order.size):
        found[place] = workers[0]
        loads[0] += lengths[order[place]]
        sink(loads, workers, 0, num_workers, 0)
    return found
