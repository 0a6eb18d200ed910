"""What the simulator predicts of a run: its own lengths, and the times of other runs with as many processes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.loop.runs import LoopRun
from benchmarks.pipe.passes import LOAD, PASS
from treering.config import RlConfig
from treering.errors import InputError
from treering.history.budget.pass_times import non_decreasing
from treering.schedule.cluster import Cluster
from treering.schedule.latency import STANDARD, Latency
from treering.schedule.policies import make_policy
from treering.schedule.policy import Assignment, Forecast, PlanRequest, Policy
from treering.schedule.predict.lengths import make_predictor
from treering.schedule.simulator.run import simulate
from treering.schedule.traces.trace import Trace, TraceStep
from treering.train.loop.batches import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedRun:
    """A run, and the times of its workers after the first epoch."""

    config: RlConfig
    run: LoopRun
    records: NDArray[np.float64]
    """As `read_passes` gives them."""
    first: int
    """Steps of the first epoch, which do not count."""

    @property
    def training_s(self) -> float:
        """Seconds of an update, with those of a step in which nothing is sampled or trained where none overlap."""
        phases = [report.phases for report in self.run.reports[self.first :]]
        updates = sum(phase.train_s + phase.update_s for phase in phases)
        if not self.config.rl.staleness:
            # Messages, rewards and advantages.
            updates = sum(phase.step_s - phase.rollout_s for phase in phases)
        return updates / len(phases)

    @property
    def num_rollouts(self) -> int:
        """That were sampled after the first epoch."""
        return sum(map(len, self.run.latest[self.first :]))


class MeasuredLatencyPolicy(Policy):
    """A policy that plans each step with the latency that a run had measured when it planned that step.

    A step is planned while the last step whose lengths it may use is trained, so that step's times are not known yet.

    Example: at staleness 1, with `latencies=[None, None, measured]`, the fifth step is planned with the measured one,
    and those before it with the cluster's.
    """

    def __init__(self, policy: Policy, latencies: Sequence[Latency | None]) -> None:
        """`latencies`: what the run had measured after 0, 1, 2, ... steps; None: nothing yet."""
        self._policy, self._latencies = policy, latencies

    @property
    def name(self) -> str:
        """Of the policy."""
        return self._policy.name

    def assign(self, request: PlanRequest) -> Assignment:
        """See `Policy`."""
        known = self._latencies[max(0, request.step - 2 - request.cluster.staleness)]
        cluster = replace(request.cluster, latency=known or request.cluster.latency)
        return self._policy.assign(replace(request, cluster=cluster))

    def learn(self, step: int, predicted: NDArray[np.float64], lengths: NDArray[np.int64]) -> None:
        """See `Policy`."""
        self._policy.learn(step, predicted, lengths)


def fit_latency(runs: Sequence[TimedRun]) -> Latency:
    """Averages over runs with the same number of processes, which slow each other down in all of them alike.

    Seconds of a pass are a curve over its rows, linear between powers of 2, plus a constant for each prefilled token;
    `prefill_s` is per rollout, each with a prompt of one token. Averages, not minima: messages and other programs take
    time in every run.

    Raises:
        InputError: no passes with at least two numbers of rows.
    """
    records = np.concatenate([run.records for run in runs])
    kind, _, seconds, rows, prefilled, sampled = records.T
    seen = (kind == PASS) & (rows > 0)
    if np.unique(rows[seen]).size < 2:
        raise InputError("a curve needs passes with two numbers of rows or more; sample more rollouts than fit at once")
    knots = _knots(rows[seen])
    design = np.column_stack([*(np.interp(rows[seen], knots, unit) for unit in np.eye(knots.size)), prefilled[seen]])
    (*decode_s, prefill_s), *_ = np.linalg.lstsq(design, seconds[seen], rcond=None)
    gain = float(sampled[seen].sum() / rows[seen].sum())
    loads = seconds[kind == LOAD]
    return Latency(
        num_rows=knots,
        # Noise may make a pass free, or prefilling save time.
        decode_s=non_decreasing(np.maximum(decode_s, seconds[seen].min())),
        tokens_per_step=np.full(knots.size, gain) if gain > 1 else None,
        prefill_s=max(0.0, prefill_s) * prefilled.sum() / sum(run.num_rollouts for run in runs),
        load_s=float(np.median(loads)) if loads.size else 0.0,
        training_s=sum(run.training_s for run in runs) / len(runs),
    )


def predict(own: TimedRun, latency: Latency) -> float:
    """Seconds of a step after the first epoch; each is planned with what the run had measured.

    Example: steps that end at 2, 3 and 5 s are predicted at 1.5 s from the second one on.
    """
    config = own.config
    believed = Cluster(
        num_workers=config.runtime.workers,
        num_slots=config.engine.max_batch,
        max_tokens=config.sampling.max_tokens,
        staleness=config.rl.staleness,
        latency=STANDARD,
        rebalancing=config.runtime.rebalance,
    )
    policy = MeasuredLatencyPolicy(make_policy(config.schedule), own.run.measured)
    trace = _trace(config, own.run.lengths())
    timeline = simulate(policy, trace, workers=replace(believed, latency=latency), believed=believed)
    ended_s = timeline.trained_s
    return float(ended_s[-1] - ended_s[own.first - 1]) / (ended_s.size - own.first)


def _trace(config: RlConfig, lengths: Sequence[NDArray[np.int64]]) -> Trace:
    """A run's rollouts, int64 [R] for each step, with the lengths forecast when each step was planned."""
    predictor = make_predictor(config.lengths, max_tokens=config.sampling.max_tokens)
    plan = StepPlan(num_tasks=config.task.num_prompts, trees_per_step=config.rl.prompts_per_step, seed=config.rl.seed)
    prompts, size = [plan.tasks_of(step) for step in range(1, len(lengths) + 1)], config.rl.group_size
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
