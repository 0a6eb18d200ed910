"""Choose the tasks that are held out of training, by a hash of their ids."""

import hashlib
import json
from collections.abc import Sequence

from treering.data.trajectory import TaskId


def is_held_out(task_id: TaskId, share: float, *, seed: int) -> bool:
    """Return whether a task is held out; other tasks and their order do not change the choice.

    All trajectories of a task are on one side. A larger share, between 0 and 1, holds out the same tasks and more.

    Example:
        >>> [task for task in range(10) if is_held_out(task, 0.2, seed=0)]
        [3]
    """
    return _rank(task_id, seed) < share * 2**64


def split_held_out(task_ids: Sequence[TaskId], share: float, *, seed: int) -> list[bool]:
    """Return `is_held_out` for each of at least two tasks, with at least one task on either side.

    Example:
        >>> split_held_out(range(3), 0.01, seed=0)
        [False, True, False]
    """
    flags = [is_held_out(each, share, seed=seed) for each in task_ids]
    if all(flags) or not any(flags):
        order = sorted(range(len(task_ids)), key=lambda i: _rank(task_ids[i], seed))
        flags[order[-1] if all(flags) else order[0]] ^= True
    return flags


def _rank(task_id: TaskId, seed: int) -> int:
    """Return a number below 2^64; tasks with the lowest numbers are held out."""
    digest = hashlib.blake2b(json.dumps([seed, task_id]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
