"""Small clusters and traces for tests."""

import numpy as np

from treering.schedule.cluster import Cluster, Latency, linear_latency
from treering.schedule.policy import AssignmentRequest, Forecast
from treering.schedule.traces import Trace, TraceStep


def cluster(
    num_workers=2, num_slots=2, *, staleness=1, max_tokens=1000, step_s=1.0, row_s=0.0, latency: Latency | None = None
) -> Cluster:
    return Cluster(
        num_workers=num_workers,
        num_slots=num_slots,
        max_tokens=max_tokens,
        staleness=staleness,
        latency=latency or linear_latency(step_s=step_s, row_s=row_s),
    )


def forecast(lengths, prompts=None) -> Forecast:
    return Forecast(lengths=lengths, prompts=np.arange(len(lengths)) if prompts is None else prompts)


def trace(*steps, max_tokens=1000, predicted=None) -> Trace:
    """Return a trace of rollouts with these lengths; without `predicted`, predictions are exact."""
    predictions = steps if predicted is None else predicted
    return Trace(
        steps=tuple(
            TraceStep(lengths=lengths, forecast=forecast(guess))
            for lengths, guess in zip(steps, predictions, strict=True)
        ),
        max_tokens=max_tokens,
    )


def assignment_request(cluster, *steps, step=1) -> AssignmentRequest:
    return AssignmentRequest(step=step, cluster=cluster, forecasts=tuple(forecast(lengths) for lengths in steps))
