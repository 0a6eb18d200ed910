"""Recordings small enough to replay by hand."""

from collections.abc import Sequence

import numpy as np
from benchmarks.draft.recording import record

from treering.analysis.recording import Recorded
from treering.data import Trajectory, render


def recording(
    rollouts: Sequence[tuple[str, Sequence[int], str]],
    *,
    epochs: Sequence[int] | None = None,
    rewards: Sequence[float] | None = None,
) -> Recorded:
    """Return a recording of (task, tokens, mask as zeros and ones)."""
    given = [
        Trajectory(
            task_id=task,
            tokens=np.array(tokens, np.int32),
            loss_mask=np.array([mark == "1" for mark in mask]),
            epoch=None if epochs is None else epochs[i],
            reward=None if rewards is None else rewards[i],
        )
        for i, (task, tokens, mask) in enumerate(rollouts)
    ]
    return record(given, render(given))[0]
