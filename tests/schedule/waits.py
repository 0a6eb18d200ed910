"""Synthetic traces whose rollouts wait for tools between their turns."""

from dataclasses import dataclass, replace

import numpy as np

from treering.schedule.cluster import Cluster
from treering.schedule.traces import Trace, TraceStep
from treering.schedule.turns import even_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitLaw:
    """Distribution of waiting, independent of rollout lengths.

    Example: with a share of 0.5, rollouts whose tokens take 100 s in a full batch wait for 100 s on average.
    """

    share: float
    """Fraction of the mean span spent waiting, in (0, 1); the rest is decoding at the speed of a full batch."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of a rollout's waiting."""
    num_turns: int = 8
    """Turns per rollout, at most one per token; rollouts wait between them."""


def with_waits(trace: Trace, law: WaitLaw, cluster: Cluster, *, noise: float, seed: int) -> Trace:
    """Add waiting between turns of equal length to a trace.

    A rollout's waiting is log-normal and independent of its length; it is split into random parts.

    Args:
        trace: without waiting.
        law: distribution of the waiting.
        cluster: its full batch defines how long tokens take.
        noise: sigma of log(predicted / actual) of the waiting, at least 0.
        seed: for the waiting and its predictions.

    Example: waiting of 3 s in 3 turns may be 1.2 s after the first turn and 1.8 s after the second.
    """
    random = np.random.default_rng((seed, 1))
    token_s = float(cluster.latency.token_s(cluster.num_slots)[-1])
    mean_length = float(np.mean([step.lengths.mean() for step in trace.steps]))
    mean_s = law.share / (1 - law.share) * mean_length * token_s
    steps = tuple(_waiting(step, law, mean_s, noise, random) for step in trace.steps)
    return replace(trace, steps=steps)


def _waiting(step: TraceStep, law: WaitLaw, mean_s: float, noise: float, random: np.random.Generator) -> TraceStep:
    wait_s = mean_s * random.lognormal(-(law.sigma**2) / 2, law.sigma, step.num_rollouts)
    even = even_turns(step.lengths, np.full(step.num_rollouts, float(law.num_turns)), wait_s)
    shares = random.exponential(size=even.wait_s.size) * (even.wait_s > 0)
    total = np.add.reduceat(shares, even.starts[:-1])
    turns = replace(even, wait_s=shares * np.repeat(wait_s / total, even.num_turns))
    forecast = replace(
        step.forecast,
        num_turns=even.num_turns.astype(np.float64),
        wait_s=wait_s * np.exp(noise * random.standard_normal(step.num_rollouts)),
    )
    return replace(step, forecast=forecast, turns=turns)
