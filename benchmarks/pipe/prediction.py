"""What the simulator predicts of a run from its own lengths, and from the times of other runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.loop.runs import LoopRun
from benchmarks.pipe.passes import LOAD, PASS
from treering.cli.train_engine import cluster_of
from treering.config import RlConfig
from treering.errors import InputError
from treering.history.budget import non_decreasing
from treering.schedule.cluster import Latency
from treering.schedule.histopipe import make_policy
from treering.schedule.policy import Assignment, AssignmentRequest, Forecast, SchedulePolicy
from treering.schedule.predict import make_predictor
from treering.schedule.simulator import Timeline, simulate
from treering.schedule.traces import Trace, TraceStep
from treering.train.loop.batches import StepTasks

_NUM_STATES = 3
"""Slowdown of a pass: alone, next to one other busy process, and next to two or more."""
_NUM_TURNS = 50
_NUM_ROUNDS = 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedRun:
    """A run, and the times of its workers after the first epoch."""

    config: RlConfig
    run: LoopRun
    records: NDArray[np.float64]
    """What `read_passes` returns."""
    first: int
    """Steps of the first epoch, which do not count."""

    @property
    def updates(self) -> NDArray[np.float64]:
        """float64 [K, 2]: begin and end of each update."""
        ended, reports = self.run.ended_s[self.first :], self.run.reports[self.first :]
        seconds = [report.phases.train_s + report.phases.update_s for report in reports]
        return np.column_stack([ended - seconds, ended])

    @property
    def training_s(self) -> float:
        """Seconds of an update, with those of a step in which nothing is sampled or trained where none overlap."""
        phases = [report.phases for report in self.run.reports[self.first :]]
        updates_s = np.array([phase.train_s + phase.update_s for phase in phases])
        if self.config.rl.staleness:
            return float(updates_s.mean())
        # Messages, rewards and advantages. A step's first rollouts begin before the call of the one before has ended.
        rest_s = np.diff(self.run.ended_s[self.first - 1 :]) - [phase.rollout_s for phase in phases]
        return float(np.maximum(rest_s, updates_s).mean())

    @property
    def num_rollouts(self) -> int:
        """That were sampled after the first epoch."""
        return sum(map(len, self.run.latest[self.first :]))

    def num_beside(self) -> NDArray[np.int64]:
        """int64 [N]: other processes at work in the middle of each record, workers with a pass and the trainer."""
        kind, started, seconds, worker = self.records[:, [0, 1, 2, -1]].T
        middle, beside = started + seconds / 2, np.zeros(worker.size, np.int64)
        for other in np.unique(worker):
            own = (worker == other) & (kind == PASS)
            spans = np.column_stack([started[own], started[own] + seconds[own]])
            beside += (worker != other) * _num_covering(middle, spans)
        return np.minimum(beside + _num_covering(middle, self.updates), _NUM_STATES - 1)


class MeasuredLatencyPolicy(SchedulePolicy):
    """A policy that plans each step with the latency that a run had measured when it planned that step.

    A step is planned while the last step whose lengths it may use is trained, so that step's times are not known yet.

    Example: at staleness 1, with `latencies=[None, None, measured]`, the fifth step is planned with the measured one,
    and those before it with the cluster's.
    """

    def __init__(self, policy: SchedulePolicy, latencies: Sequence[Latency | None]) -> None:
        """`latencies`: what the run had measured after 0, 1, 2, ... steps; None: nothing yet."""
        self._policy, self._latencies = policy, latencies

    @property
    def name(self) -> str:
        """Name of the policy."""
        return self._policy.name

    def assign(self, request: AssignmentRequest) -> Assignment:
        """Assign with the latency that was known two steps and the staleness ago."""
        known = self._latencies[max(0, request.step - 2 - request.cluster.staleness)]
        cluster = replace(request.cluster, latency=known or request.cluster.latency)
        return self._policy.assign(replace(request, cluster=cluster))

    def learn(self, step: int, predicted: NDArray[np.float64], lengths: NDArray[np.int64]) -> None:
        """Hand the lengths to the policy."""
        self._policy.learn(step, predicted, lengths)


def fit_latency(runs: Sequence[TimedRun]) -> tuple[Latency, NDArray[np.float64]]:
    """Averages of runs: the times of a process that runs alone, and the slowdown of a pass by those next to it.

    Seconds of a pass are a curve over its rows, linear between powers of 2, plus a constant for each prefilled token,
    times a factor for 0, 1 and 2 other processes at work; curve and factors are fitted in turn. `prefill_s` is per
    rollout, each with a prompt of one token. Averages, not minima: messages and other programs take time in every run.

    Raises:
        InputError: no passes with at least two numbers of rows.
    """
    records = np.concatenate([run.records for run in runs])
    beside = np.concatenate([run.num_beside() for run in runs])
    kind, seconds, rows, prefilled, sampled = records[:, [0, 2, 3, 4, 5]].T
    seen = (kind == PASS) & (rows > 0)
    if np.unique(rows[seen]).size < 2:
        raise InputError("a curve needs passes with two numbers of rows or more; sample more rollouts than fit at once")
    knots = _knots(rows[seen])
    design = np.column_stack([*(np.interp(rows[seen], knots, unit) for unit in np.eye(knots.size)), prefilled[seen]])
    factors = np.ones(_NUM_STATES)
    for _ in range(_NUM_TURNS):
        found, *_ = np.linalg.lstsq(design, seconds[seen] / factors[beside[seen]], rcond=None)
        factors = _factors(seconds[seen], design @ found, beside[seen])
    gain = float(sampled[seen].sum() / rows[seen].sum())
    loads = seconds[kind == LOAD]
    latency = Latency(
        num_rows=knots,
        # Noise may make a pass free, or prefilling save time.
        decode_s=non_decreasing(np.maximum(found[:-1], seconds[seen].min() / factors.max())),
        tokens_per_step=np.full(knots.size, gain) if gain > 1 else None,
        prefill_s=max(0.0, found[-1]) * prefilled.sum() / sum(run.num_rollouts for run in runs),
        load_s=float(np.median(loads)) if loads.size else 0.0,
        training_s=sum(run.training_s for run in runs) / len(runs),
    )
    return latency, factors


def predict(own: TimedRun, alone: Latency, factors: NDArray[np.float64]) -> float:
    """Seconds of a step after the first epoch; each is planned with what the run had measured.

    How many processes share the machine decides how fast they are, and how fast they are decides when they run. So the
    simulation is repeated, each time with the overlap of processes that the one before found.

    Example: steps that end at 2, 3 and 5 s are predicted at 1.5 s from the second one on.
    """
    config = own.config
    believed = cluster_of(config)
    trace, factor = _trace(config, own.run.lengths()), 1.0
    for _ in range(_NUM_ROUNDS):
        policy = MeasuredLatencyPolicy(make_policy(config.schedule), own.run.measured)
        latency = replace(alone, decode_s=alone.decode_s * factor, prefill_s=alone.prefill_s * factor)
        timeline = simulate(policy, trace, workers=replace(believed, latency=latency), believed=believed)
        # Half way, so that it does not oscillate.
        factor = (factor + 1.0 / float((_shares(timeline) / factors).sum())) / 2
    ended_s = timeline.trained_s
    return float(ended_s[-1] - ended_s[own.first - 1]) / (ended_s.size - own.first)


def _factors(real: NDArray[np.float64], alone: NDArray[np.float64], beside: NDArray[np.int64]) -> NDArray[np.float64]:
    """Seconds with 0, 1 and 2 others over those of the curve, never falling; a rare state counts as the one before."""
    counts, real_s, alone_s = (np.bincount(beside, each, _NUM_STATES) for each in (np.ones(beside.size), real, alone))
    known = np.flatnonzero(counts >= min(30, counts.max()))
    ratios = np.interp(np.arange(_NUM_STATES), known, real_s[known] / np.maximum(alone_s[known], 1e-12))
    return np.maximum.accumulate(ratios / ratios[0])


def _shares(timeline: Timeline) -> NDArray[np.float64]:
    """float64 [states]: the share of the workers' busy time with that many other workers or trainers at work.

    Example: two workers that run [0, 4] and [0, 2], then an update of 1 s: 2/6, 4/6, 0.
    """
    before = np.concatenate([[0.0], timeline.trained_s[:-1]])
    updates = np.column_stack([np.maximum(timeline.sampled_s, before), timeline.trained_s])
    spans = np.column_stack([timeline.started_s, timeline.ended_s])
    edges = np.unique(np.concatenate([spans.ravel(), updates.ravel()]))
    middle = (edges[1:] + edges[:-1]) / 2
    busy, training = _num_covering(middle, spans), np.minimum(1, _num_covering(middle, updates))
    beside = np.minimum(np.maximum(0, busy - 1) + training, _NUM_STATES - 1)
    weights = np.diff(edges) * busy
    return np.bincount(beside, weights, minlength=_NUM_STATES) / weights.sum()


def _num_covering(times: NDArray[np.float64], spans: NDArray[np.float64]) -> NDArray[np.int64]:
    """int64: spans around each time."""
    begun = np.searchsorted(np.sort(spans[:, 0]), times, side="right")
    return begun - np.searchsorted(np.sort(spans[:, 1]), times, side="right")


def _trace(config: RlConfig, lengths: Sequence[NDArray[np.int64]]) -> Trace:
    """A run's rollouts, int64 [R] for each step, with the lengths forecast when each step was planned."""
    predictor = make_predictor(max_tokens=config.sampling.max_tokens)
    step_tasks = StepTasks(
        num_tasks=config.task.num_sums, trees_per_step=config.rl.prompts_per_step, seed=config.rl.seed
    )
    prompts, size = [step_tasks.tasks_of(step) for step in range(1, len(lengths) + 1)], config.rl.group_size
    steps = []
    for number, (own, real) in enumerate(zip(prompts, lengths, strict=True), 1):
        known = number - 1 - config.rl.staleness
        if known >= 1:
            for prompt, group in zip(prompts[known - 1], lengths[known - 1].reshape(-1, size), strict=True):
                predictor.observe(int(prompt), group)
        forecast = Forecast(lengths=predictor.predict(own.tolist(), size), prompts=np.repeat(own, size))
        steps.append(TraceStep(lengths=real, forecast=forecast, num_prompt_tokens=np.ones_like(real)))
    return Trace(steps=tuple(steps), max_tokens=config.sampling.max_tokens)


def _knots(rows: NDArray[np.float64]) -> NDArray[np.int64]:
    """The smallest and the greatest number of rows, and the powers of 2 between them."""
    least, most = int(rows.min()), int(rows.max())
    powers = [1 << power for power in range(most.bit_length()) if least < 1 << power < most]
    return np.array([least, *powers, most], np.int64)
