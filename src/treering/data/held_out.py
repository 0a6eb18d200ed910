"""Which tasks are held out of training: a stable choice by their ids."""

import hashlib
import json

from treering.data.trajectory import TaskId


def is_held_out(task_id: TaskId, share: float, *, seed: int) -> bool:
    """Whether a task is among the share that is held out; more data never changes it, nor does their order.

    Args:
        task_id: of the task or prompt; all of its trajectories are on one side.
        share: of the tasks, between 0 and 1; a larger share holds out the same tasks and more.
        seed: of the choice.

    Example:
        >>> [task for task in range(10) if is_held_out(task, 0.2, seed=0)]
        [3]
    """
    digest = hashlib.blake2b(json.dumps([seed, task_id]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
