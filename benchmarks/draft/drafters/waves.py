"""The order in which rollouts run: samples of equal number side by side, one generation after another."""

import numpy as np

from treering.analysis.recording import Recorded
from treering.arrays import Int64Array

NEVER = np.iinfo(np.int64).max


def in_waves(recorded: Recorded, rollouts: Int64Array, num_rows: int) -> tuple[Int64Array, Int64Array]:
    """Rollouts in the order of a run that takes the first sample of every task, then the second of every task.

    Args:
        recorded: the rollouts.
        rollouts: int64 [K], ascending.
        num_rows: rollouts of a wave at most.

    Returns:
        int64 [K] rollouts by generation, number of the sample and task, and int64 [K] the wave of each: those of one
        wave are of one generation and number.

    Example: tasks a, a, b, b, b with 2 rows run in the order 0 2 1 3 4, in the waves 0 0 1 1 2.
    """
    generations, tasks = recorded.epochs[rollouts], recorded.prompts[rollouts]
    ranks = _ranks(tasks, generations)
    order = np.lexsort((tasks, ranks, generations))
    kinds = np.stack([generations[order], ranks[order]])
    is_first = np.ones(order.size, np.bool_)
    is_first[1:] = (np.diff(kinds) != 0).any(axis=0)
    numbers = np.arange(order.size)
    since = numbers - np.maximum.accumulate(np.where(is_first, numbers, 0))
    return rollouts[order], np.cumsum(since % num_rows == 0) - 1


def generations_later(recorded: Recorded, count: int) -> Int64Array:
    """int64 [R]: the generation of each rollout's task that comes `count` after its own, `NEVER` where none does.

    Example: a task with rollouts of the epochs 0, 0, 2, 5 has 2, 2, 5, NEVER for a count of 1.
    """
    pairs, inverse = np.unique(np.stack([recorded.prompts, recorded.epochs]), axis=1, return_inverse=True)
    later = np.minimum(np.arange(pairs.shape[1]) + count, pairs.shape[1] - 1)
    has_later = (np.arange(pairs.shape[1]) + count < pairs.shape[1]) & (pairs[0, later] == pairs[0])
    found: Int64Array = np.where(has_later, pairs[1, later], NEVER)[inverse.reshape(-1)]
    return found


def _ranks(tasks: Int64Array, generations: Int64Array) -> Int64Array:
    """The number of each rollout within its task and generation."""
    order = np.lexsort((tasks, generations))
    numbers = np.arange(order.size)
    is_first = np.ones(order.size, np.bool_)
    is_first[1:] = (np.diff(tasks[order]) != 0) | (np.diff(generations[order]) != 0)
    ranks = np.empty(order.size, np.int64)
    ranks[order] = numbers - np.maximum.accumulate(np.where(is_first, numbers, 0))
    return ranks
