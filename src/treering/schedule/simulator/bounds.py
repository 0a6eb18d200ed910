"""Lower bounds on the makespan: all work at the best batch size, and the chain of longest spans."""

from dataclasses import replace

import numpy as np

from treering.schedule.cluster import Cluster
from treering.schedule.traces.trace import Trace, TraceStep


def work_s(step: TraceStep, cluster: Cluster) -> float:
    """Seconds of a step if every worker always decodes at its best batch size.

    Example: 4 rollouts of 100 tokens on 2 workers with 2 slots, a step of 20 + 1 s a row: 400 tokens at 11 s, halved.
    """
    rows = cluster.latency.token_s(cluster.num_slots)[1:]
    per_token = float((rows / np.arange(1, rows.size + 1)).min())
    return (int(step.lengths.sum()) * per_token + _prefill_s(step, cluster)) / cluster.num_workers


def with_training(cluster: Cluster, trace: Trace, share: float) -> Cluster:
    """The cluster with an update time that is a share of the work bound of the trace's mean step.

    Example: a share of 0.07 where the workers need 1,000 s at their best batch is an update of 70 s.
    """
    work = float(np.mean([work_s(step, cluster) for step in trace.steps]))
    return replace(cluster, latency=replace(cluster.latency, training_s=share * work))


def longest_s(step: TraceStep, cluster: Cluster) -> float:
    """Seconds of a step's longest span: a rollout's tokens at the fastest batch size, and its waiting."""
    token_s = float(cluster.latency.token_s(cluster.num_slots)[1:].min())
    if step.turns is None:
        return int(step.lengths.max()) * token_s
    return float((step.lengths * token_s + step.turns.total_wait_s).max())


def bound_s(trace: Trace, cluster: Cluster) -> float:
    """Lower bound on the seconds of a whole run: the larger of two.

    All work at the best batch size, then the last update. And for each chain of dependent steps (every staleness + 1st
    one): its longest spans and updates in sequence, with weight loads in between.

    Example: 12 equal steps with work 1, longest rollout 2.6 and updates of 0.07: max(12.07, 6 x 2.67) at staleness 1,
    and 12 x 2.67 at staleness 0.
    """
    lag, training_s = cluster.staleness + 1, cluster.latency.training_s
    work = sum(work_s(step, cluster) for step in trace.steps) + training_s
    # Each step of a chain loads the weights of the previous one; the first uses the initial weights.
    links = np.array([cluster.latency.load_s + longest_s(step, cluster) + training_s for step in trace.steps])
    chains = [float(links[first::lag].sum()) - cluster.latency.load_s for first in range(min(lag, links.size))]
    return max(work, *chains)


def _prefill_s(step: TraceStep, cluster: Cluster) -> float:
    tokens = 0 if step.num_prompt_tokens is None else int(step.num_prompt_tokens.sum())
    return tokens * cluster.latency.prefill_s
