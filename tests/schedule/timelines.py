"""Hand-made timelines."""

import numpy as np

from treering.schedule.simulator import Timeline


def timeline(policy="fifo", *, num_workers=2, num_steps=2, span_s=40.0, training_s=5.0, bound_s=60.0) -> Timeline:
    """Return a timeline in which worker w of W runs each step for (w + 1) / W of a span, followed by training."""
    steps = np.repeat(np.arange(1, num_steps + 1), num_workers)
    workers = np.tile(np.arange(num_workers), num_steps)
    started = (steps - 1) * (span_s + training_s)
    trained = np.arange(1, num_steps + 1) * (span_s + training_s)
    return Timeline(
        policy=policy,
        workers=workers.astype(np.int32),
        steps=steps.astype(np.int32),
        started_s=started,
        ended_s=started + span_s * (workers + 1) / num_workers,
        num_rollouts=np.full(steps.size, 1234),
        sampled_s=trained - training_s,
        trained_s=trained,
        num_workers=num_workers,
        num_tokens=1000,
        bound_s=bound_s,
        staleness_max=0,
        num_stolen=0,
        num_moved=0,
    )
