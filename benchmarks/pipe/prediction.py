"""The simulator's prediction of a run, from its lengths, the latencies that its policy used, and a measured one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.loop.runs import prompts_of_step
from benchmarks.pipe.machine import Machine
from treering.config import RlConfig
from treering.schedule.cluster import Cluster
from treering.schedule.latency import STANDARD, Latency
from treering.schedule.policies import make_policy
from treering.schedule.policy import Assignment, Forecast, PlanRequest, Policy
from treering.schedule.predict.lengths import make_predictor
from treering.schedule.simulator.run import simulate
from treering.schedule.simulator.timeline import Timeline
from treering.schedule.traces.trace import Trace, TraceStep

_NUM_ROUNDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of the steps after the first ones."""

    step_s: float
    bubble: float
    """Share of the workers' time in which they sample nothing."""


class MeasuredLatencyPolicy(Policy):
    """A policy that plans each step with the latency that a run had measured when it planned that step.

    A step is planned while the last step whose lengths it may use is trained, so that step's times are not known yet.

    Example: at staleness 1, with `latencies=[None, None, measured]`, the fifth step is planned with the measured one,
    and those before it with the cluster's.
    """

    def __init__(self, policy: Policy, latencies: Sequence[Latency | None]) -> None:
        """`latencies`: what the run had measured after 0, 1, 2, ... steps; None: nothing yet."""
        self._policy = policy
        self._latencies = latencies

    @property
    def name(self) -> str:
        return self._policy.name

    @property
    def choices(self) -> tuple[str, ...]:
        return self._policy.choices

    def assign(self, request: PlanRequest) -> Assignment:
        known = self._latencies[max(0, request.step - 2 - request.cluster.staleness)]
        cluster = replace(request.cluster, latency=known or request.cluster.latency)
        return self._policy.assign(replace(request, cluster=cluster))

    def learn(self, step: int, predicted: NDArray[np.float64], lengths: NDArray[np.int64]) -> None:
        self._policy.learn(step, predicted, lengths)


def cluster_of(config: RlConfig, latency: Latency = STANDARD) -> Cluster:
    """The workers of a configuration."""
    return Cluster(
        num_workers=config.runtime.workers,
        num_slots=config.engine.max_batch,
        max_tokens=config.sampling.max_tokens,
        staleness=config.rl.staleness,
        latency=latency,
        rebalancing=config.runtime.rebalance,
    )


def trace_of(config: RlConfig, lengths: Sequence[NDArray[np.int64]]) -> Trace:
    """A run's rollouts, int64 [R] for each step, with the lengths forecast when each step was planned.

    Every rollout has a prompt of one token, to which `fit_machine` fits the time of prefill.
    """
    predictor = make_predictor(config.lengths, max_tokens=config.sampling.max_tokens)
    prompts, size = prompts_of_step(config, len(lengths)), config.rl.group_size
    steps = []
    for number, (own, real) in enumerate(zip(prompts, lengths, strict=True), 1):
        known = number - 1 - config.rl.staleness
        if known >= 1:
            for prompt, group in zip(prompts[known - 1], lengths[known - 1].reshape(-1, size), strict=True):
                predictor.observe(int(prompt), group)
        forecast = Forecast(lengths=predictor.predict(own.tolist(), size), prompts=np.repeat(own, size))
        steps.append(TraceStep(lengths=real, forecast=forecast, num_prompt_tokens=np.ones_like(real)))
    return Trace(steps=tuple(steps), max_tokens=config.sampling.max_tokens)


def predict(
    config: RlConfig,
    lengths: Sequence[NDArray[np.int64]],
    machine: Machine,
    *,
    first: int,
    measured: Sequence[Latency | None],
) -> Prediction:
    """Seconds and bubble of the steps after the first `first`.

    Each step is planned with what the run had measured, see `MeasuredLatencyPolicy`.

    How many processes share the machine decides how fast they are, and how fast they are decides when they run. So the
    simulation is repeated, each time with the overlap of processes that the one before found.

    Example: steps that end at 2, 3 and 5 s are predicted at 1.5 s from the second one on.
    """
    trace, believed = trace_of(config, lengths), cluster_of(config)
    shares, num_busy = np.eye(machine.factors.size)[0], 0.0
    for _ in range(_NUM_ROUNDS):
        cluster = cluster_of(config, machine.latency(shares, num_busy))
        policy = MeasuredLatencyPolicy(make_policy(config.schedule), measured)
        timeline = simulate(policy, trace, workers=cluster, believed=believed)
        new_shares, new_busy = beside_each_other(timeline, machine.factors.size)
        # Half way, so that it does not oscillate.
        shares, num_busy = (shares + new_shares) / 2, (num_busy + new_busy) / 2
    begins, ends = float(timeline.trained_s[first - 1]), float(timeline.trained_s[-1])
    return Prediction(
        step_s=(ends - begins) / (len(lengths) - first),
        bubble=_bubble(timeline, begins, ends),
    )


def beside_each_other(timeline: Timeline, num_states: int) -> tuple[NDArray[np.float64], float]:
    """How a timeline's processes run side by side.

    Returns:
        The share of the workers' busy time with j other workers or trainers at work, float64 [num_states], more of them
        counted with the last; and the workers at work during updates, on average.

    Example: two workers that run [0, 4] and [0, 2], then an update of 1 s: (2/6, 4/6, 0) and 0.
    """
    before = np.concatenate([[0.0], timeline.trained_s[:-1]])
    updates = np.column_stack([np.maximum(timeline.sampled_s, before), timeline.trained_s])
    spans = np.column_stack([timeline.started_s, timeline.ended_s])
    edges = np.unique(np.concatenate([spans.ravel(), updates.ravel()]))
    lengths, middle = np.diff(edges), (edges[1:] + edges[:-1]) / 2
    busy = _num_covering(middle, spans)
    training = np.minimum(1, _num_covering(middle, updates))
    weights = lengths * busy
    beside = np.minimum(np.maximum(0, busy - 1) + training, num_states - 1)
    shares = np.bincount(beside, weights, minlength=num_states) / weights.sum()
    trained_s = float((lengths * training).sum())
    return shares, float((weights * training).sum()) / trained_s if trained_s else 0.0


def _num_covering(times: NDArray[np.float64], spans: NDArray[np.float64]) -> NDArray[np.int64]:
    """int64: spans around each time."""
    begun = np.searchsorted(np.sort(spans[:, 0]), times, side="right")
    return begun - np.searchsorted(np.sort(spans[:, 1]), times, side="right")


def _bubble(timeline: Timeline, begins: float, ends: float) -> float:
    busy = np.minimum(timeline.ended_s, ends) - np.maximum(timeline.started_s, begins)
    return 1.0 - float(np.maximum(busy, 0.0).sum()) / (timeline.num_workers * (ends - begins))
