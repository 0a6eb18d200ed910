"""Lower bounds on the makespan: all work at the best batch size, and the chain of longest rollouts."""

from dataclasses import replace

import numpy as np

from treering.schedule.cluster import Cluster
from treering.schedule.traces.trace import Trace, TraceStep


def work_s(step: TraceStep, cluster: Cluster) -> float:
    """Seconds that a step takes when every worker decodes at its best batch all the time.

    Example: 4 rollouts of 100 tokens on 2 workers with 2 slots, a step of 20 + 1 s a row: 400 tokens at 11 s, halved.
    """
    rows = cluster.latency.token_s(cluster.num_slots)[1:]
    per_token = float((rows / np.arange(1, rows.size + 1)).min())
    return (int(step.lengths.sum()) * per_token + _prefill_s(step, cluster)) / cluster.num_workers


def with_training(cluster: Cluster, trace: Trace, share: float) -> Cluster:
    """The cluster with an update that takes a share of the work bound of a trace's mean step.

    Example: a share of 0.07 where the workers need 1,000 s at their best batch is an update of 70 s.
    """
    work = float(np.mean([work_s(step, cluster) for step in trace.steps]))
    return replace(cluster, latency=replace(cluster.latency, training_s=share * work))


def longest_s(step: TraceStep, cluster: Cluster) -> float:
    """Seconds of a step's longest rollout where it has the fastest batch for itself."""
    return int(step.lengths.max()) * float(cluster.latency.token_s(cluster.num_slots)[1:].min())


def bound_s(trace: Trace, cluster: Cluster) -> float:
    """The least seconds of a whole run: the larger of two.

    All work at the best batch, then the last update. And for each chain of steps that wait for each other (every
    staleness + 1st one): its longest rollouts and updates, one after the other, and loading weights in between.

    Example: 12 equal steps with work 1, longest rollout 2.6 and updates of 0.07: max(12.07, 6 x 2.67) at staleness 1,
    and 12 x 2.67 at staleness 0.
    """
    lag, training_s = cluster.staleness + 1, cluster.latency.training_s
    work = sum(work_s(step, cluster) for step in trace.steps) + training_s
    # Each link loads the weights of the one before; the first has those that the run began with.
    links = np.array([cluster.latency.load_s + longest_s(step, cluster) + training_s for step in trace.steps])
    chains = [float(links[first::lag].sum()) - cluster.latency.load_s for first in range(min(lag, links.size))]
    return max(work, *chains)


def _prefill_s(step: TraceStep, cluster: Cluster) -> float:
    tokens = 0 if step.num_prompt_tokens is None else int(step.num_prompt_tokens.sum())
    return tokens * cluster.latency.prefill_s
