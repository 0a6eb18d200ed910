"""Simulate a run in virtual time: steps on workers and a trainer, the lower bound, and the figures of the run."""

from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError
from treering.schedule.cluster import STANDARD, Cluster, without_moves
from treering.schedule.migration import CONSOLIDATE, DRAIN, OFF
from treering.schedule.policy import Assignment, AssignmentRequest, SchedulePolicy
from treering.schedule.simulated_step import Rules, StepRollouts, run_step
from treering.schedule.traces import Trace, TraceStep
from treering.schedule.turns import Parts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Timeline of one policy on one trace.

    Example: two workers that run [0, 4] and [0, 2] of one step, then train for 1, have a makespan of 5 and a bubble of
    2 / 8: of the 8 seconds until the last rollout ended, a worker is idle for 2.
    """

    policy: str
    """Name of the policy."""
    workers: NDArray[np.int32]
    """int32 [P]: worker of each span."""
    steps: NDArray[np.int32]
    """int32 [P]: step of each span, from 1."""
    started_s: NDArray[np.float64]
    """float64 [P]: start of each span."""
    ended_s: NDArray[np.float64]
    """float64 [P]: end of each span."""
    num_rollouts: NDArray[np.int64]
    """int64 [P]: rollouts that ended in each span."""
    sampled_s: NDArray[np.float64]
    """float64 [K]: when each step's last rollout ended."""
    trained_s: NDArray[np.float64]
    """float64 [K]: when each step's update ended."""
    num_workers: int
    """W."""
    num_tokens: int
    """Sampled tokens of all steps."""
    bound_s: float
    """Lower bound on the makespan of any schedule, see `bound_s`."""
    staleness_max: int
    """Most updates between the weights that sampled a token and those that it trained."""
    num_stolen: int
    """Rollouts that started on another worker than assigned."""
    num_moved: int
    """Moves of running rollouts."""
    choices: tuple[str, ...] = ()
    """The placement used for each step, if the policy chooses among placements."""

    @property
    def makespan_s(self) -> float:
        """Time until the end of the last update."""
        return float(self.trained_s[-1])

    @property
    def bubble(self) -> float:
        """Share of all workers' time, until the last rollout ended, without decoding."""
        total = self.num_workers * float(self.sampled_s.max())
        # By rounding, the sum may be slightly more than the whole.
        return max(0.0, 1.0 - float((self.ended_s - self.started_s).sum()) / total)

    @property
    def throughput_of_bound(self) -> float:
        """Lower bound over makespan: 1.0 is the best possible."""
        return self.bound_s / self.makespan_s

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second of the whole run."""
        return self.num_tokens / self.makespan_s


def work_s(step: TraceStep, cluster: Cluster) -> float:
    """Return the seconds of a step if every worker always decodes at its best batch size.

    Example: 4 rollouts of 100 tokens on 2 workers with 2 slots, a step of 20 + 1 s a row: 400 tokens at 11 s, halved.
    """
    rows = cluster.latency.token_s(cluster.num_slots)[1:]
    per_token = float((rows / np.arange(1, rows.size + 1)).min())
    num_prefilled = 0 if step.num_prompt_tokens is None else int(step.num_prompt_tokens.sum())
    prefill_s = num_prefilled * cluster.latency.prefill_s
    return (int(step.lengths.sum()) * per_token + prefill_s) / cluster.num_workers


def with_training(cluster: Cluster, trace: Trace, share: float) -> Cluster:
    """Return the cluster with an update time that is a share of the work bound of the trace's mean step.

    Example: a share of 0.07 where the workers need 1,000 s at their best batch is an update of 70 s.
    """
    work = float(np.mean([work_s(step, cluster) for step in trace.steps]))
    return replace(cluster, latency=replace(cluster.latency, training_s=share * work))


def longest_s(step: TraceStep, cluster: Cluster) -> float:
    """Return the seconds of a step's longest span: a rollout's tokens at the fastest batch size, and its waiting."""
    token_s = float(cluster.latency.token_s(cluster.num_slots)[1:].min())
    if step.turns is None:
        return int(step.lengths.max()) * token_s
    return float((step.lengths * token_s + step.turns.total_wait_s).max())


def bound_s(trace: Trace, cluster: Cluster) -> float:
    """Return the lower bound on the seconds of a whole run: the larger of two.

    One is all work at the best batch size, then the last update. The other is the longest chain of dependent steps
    (every staleness + 1st one): its longest spans and updates in sequence, with weight loads in between.

    Example: 12 equal steps with work 1, longest rollout 2.6 and updates of 0.07: max(12.07, 6 x 2.67) at staleness 1,
    and 12 x 2.67 at staleness 0.
    """
    lag, training_s = cluster.staleness + 1, cluster.latency.training_s
    work = sum(work_s(step, cluster) for step in trace.steps) + training_s
    # Each step of a chain loads the weights of the previous one; the first uses the initial weights.
    links = np.array([cluster.latency.load_s + longest_s(step, cluster) + training_s for step in trace.steps])
    chains = [float(links[first::lag].sum()) - cluster.latency.load_s for first in range(min(lag, links.size))]
    return max(work, *chains)


_MOVING = MappingProxyType({"off": OFF, "drain": DRAIN, "consolidate": CONSOLIDATE})

NUM_FORECASTS = 4
"""Steps in a request, including the present one."""


def simulate(
    policy: SchedulePolicy, trace: Trace, *, workers: Cluster | int, believed: Cluster | None = None
) -> Timeline:
    """Simulate a run with a policy.

    Step k waits for the weights after step k - 1 - staleness, and each worker for its share of the previous step. A
    step is trained when its last rollout has ended and the previous step is trained. A waiting rollout holds no slot,
    and comes back to its worker. In a trace with waits, running rollouts do not move.

    Args:
        policy: a new policy; it assigns every step in order.
        trace: lengths and predictions.
        workers: the cluster, or a number of workers of `standard_cluster`.
        believed: the cluster that the policy assumes; None for the real one.

    Raises:
        InputError: an assignment has an absent worker or another number of rollouts.

    Example:
        >>> simulate(HistoPipe(), trace, workers=cluster).throughput_of_bound                       # doctest: +SKIP
        0.93
    """
    cluster = workers if isinstance(workers, Cluster) else standard_cluster(trace, workers)
    if trace.has_waits:
        cluster, believed = without_moves(cluster), without_moves(believed or cluster)
    run = _Simulation(trace, cluster)
    for number, step in enumerate(trace.steps, 1):
        known = number - 1 - cluster.staleness
        if known >= 1:
            past = trace.steps[known - 1]
            policy.learn(known, past.forecast.lengths, past.lengths)
        ahead = trace.steps[number - 1 : number - 1 + NUM_FORECASTS]
        request = AssignmentRequest(
            step=number, cluster=believed or cluster, forecasts=tuple(later.forecast for later in ahead)
        )
        run.add(number, step, checked(policy.assign(request), step.num_rollouts, cluster.num_workers))
    return run.timeline(policy)


def standard_cluster(trace: Trace, num_workers: int) -> Cluster:
    """Return workers of 128 slots at staleness 1, whose decode steps take 20 s and 0.05 s more per row.

    An update takes 7 % of the work of a mean step at the best batch size, about as in RhymeRL (section 3).

    Example: `simulate(HistoPipe(), trace, workers=32)` runs a trace on 32 of them.
    """
    cluster = Cluster(
        num_workers=num_workers,
        num_slots=128,
        max_tokens=trace.max_tokens,
        staleness=1,
        latency=STANDARD,
    )
    return with_training(cluster, trace, 0.07)


def checked(assignment: Assignment, num_rollouts: int, num_workers: int) -> Assignment:
    """Check that every rollout of an assignment has an existing worker, and return the assignment."""
    workers = assignment.workers
    absent = workers[(workers < 0) | (workers >= num_workers)]
    if workers.size != num_rollouts or absent.size:
        raise InputError(
            f"an assignment must give each of {num_rollouts} rollouts a worker from 0 to {num_workers - 1}, got "
            f"{workers.size} workers, {absent.size} of them absent ({absent[:4].tolist()}); correct the policy"
        )
    return assignment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Share:
    workers: NDArray[np.int64]
    started_s: NDArray[np.float64]
    ended_s: NDArray[np.float64]
    counts: NDArray[np.int64]
    num_stolen: int
    num_moved: int


class _Simulation:
    def __init__(self, trace: Trace, cluster: Cluster) -> None:
        self._trace = trace
        self._cluster = cluster
        self._token_s = cluster.latency.token_s(cluster.num_slots)
        self._free = np.zeros(cluster.num_workers)
        self._sampled: list[float] = []
        self._trained: list[float] = []
        self._shares: list[_Share] = []

    def add(self, number: int, step: TraceStep, assignment: Assignment) -> None:
        cluster, latency = self._cluster, self._cluster.latency
        version = cluster.version_of(number)
        opened = self._trained[version - 1] if version else 0.0
        starts = np.maximum(self._free, opened) + (latency.load_s if version else 0.0)
        work = queued_rollouts(step, assignment, cluster.num_workers)
        stealing, moving = assignment.stealing == "queued", OFF if step.has_waits else _MOVING[assignment.moving]
        rules = Rules(self._token_s, latency.prefill_s, float(cluster.max_tokens), stealing, moving)
        outcome = run_step(starts, work, rules)
        (joined,) = np.nonzero(np.diff(work.offsets))
        self._free[joined] = outcome.ends[joined]
        self._shares.append(
            _Share(
                workers=joined,
                started_s=starts[joined],
                ended_s=outcome.ends[joined],
                counts=outcome.counts[joined],
                num_stolen=outcome.num_stolen,
                num_moved=outcome.num_moved,
            )
        )
        self._sampled.append(float(outcome.finished.max()))
        before = self._trained[-1] if self._trained else 0.0
        self._trained.append(max(self._sampled[-1], before) + latency.training_s)

    def timeline(self, policy: SchedulePolicy) -> Timeline:
        shares, sizes = self._shares, [share.workers.size for share in self._shares]
        return Timeline(
            policy=policy.name,
            workers=np.concatenate([share.workers for share in shares]).astype(np.int32),
            steps=np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes),
            started_s=np.concatenate([share.started_s for share in shares]),
            ended_s=np.concatenate([share.ended_s for share in shares]),
            num_rollouts=np.concatenate([share.counts for share in shares]),
            sampled_s=np.array(self._sampled),
            trained_s=np.array(self._trained),
            num_workers=self._cluster.num_workers,
            num_tokens=sum(int(step.lengths.sum()) for step in self._trace.steps),
            bound_s=bound_s(self._trace, self._cluster),
            staleness_max=max(k - 1 - self._cluster.version_of(k) for k in range(1, len(sizes) + 1)),
            num_stolen=sum(share.num_stolen for share in shares),
            num_moved=sum(share.num_moved for share in shares),
            choices=policy.choices,
        )


def queued_rollouts(step: TraceStep, assignment: Assignment, num_workers: int) -> StepRollouts:
    """Queue the rollouts of a step at their workers."""
    queued = assignment.order[np.argsort(assignment.workers[assignment.order], kind="stable")]
    sizes = np.bincount(assignment.workers, minlength=num_workers)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    corrected = assignment.predicted_lengths
    predicted = step.forecast.lengths if corrected is None else corrected
    prompts = np.zeros_like(step.lengths) if step.num_prompt_tokens is None else step.num_prompt_tokens
    whole = Parts(np.arange(step.num_rollouts + 1), step.lengths, np.zeros(step.num_rollouts))
    parts = whole if step.turns is None else step.turns.parts()
    return StepRollouts(offsets, queued, step.lengths, predicted, prompts, *parts)
