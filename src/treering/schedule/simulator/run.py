"""Simulates a run: a policy places the rollouts of a trace, and the result is a timeline.

K steps, W workers, R rollouts of a step
"""

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError
from treering.schedule.cluster import Cluster, without_moves
from treering.schedule.latency import STANDARD
from treering.schedule.policy import Assignment, PlanRequest, Policy
from treering.schedule.simulator.bounds import bound_s, with_training
from treering.schedule.simulator.events import run_step
from treering.schedule.simulator.migration import CONSOLIDATE, DRAIN, OFF
from treering.schedule.simulator.step import Rules, StepRollouts
from treering.schedule.simulator.timeline import Timeline
from treering.schedule.traces.trace import Trace, TraceStep
from treering.schedule.turns import Parts

_MOVING = MappingProxyType({"off": OFF, "drain": DRAIN, "consolidate": CONSOLIDATE})

NUM_FORECASTS = 4
"""Steps in a request, including the present one."""


def simulate(policy: Policy, trace: Trace, *, workers: Cluster | int, believed: Cluster | None = None) -> Timeline:
    """Simulates a run with a policy.

    Step k waits for the weights after step k - 1 - staleness, and each worker for its share of the previous step. A
    step is trained when its last rollout has ended and the previous step is trained. A rollout that waits holds no slot
    of its worker, which it comes back to; running rollouts of a trace with waits do not move.

    Args:
        policy: a new one; it assigns every step in order.
        trace: lengths and predictions.
        workers: the cluster, or a number of workers of `standard_cluster`.
        believed: the cluster that the policy plans with; None is the real one.

    Raises:
        InputError: an assignment to absent workers, or of another number of rollouts.

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
        request = PlanRequest(
            step=number, cluster=believed or cluster, forecasts=tuple(later.forecast for later in ahead)
        )
        run.add(number, step, checked(policy.assign(request), step.num_rollouts, cluster.num_workers))
    return run.timeline(policy)


def standard_cluster(trace: Trace, num_workers: int) -> Cluster:
    """Workers of 128 slots at staleness 1, whose decode steps take 20 s and 0.05 s more a row.

    An update takes 7 % of the work of a mean step at the best batch size: about as in RhymeRL (section 3).

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
    """The assignment, after checking that every rollout has an existing worker."""
    workers = assignment.workers
    absent = workers[(workers < 0) | (workers >= num_workers)]
    if workers.size != num_rollouts or absent.size:
        raise InputError(
            f"an assignment gives each of {num_rollouts} rollouts a worker from 0 to {num_workers - 1}, got "
            f"{workers.size} workers, of which {absent.size} are not there ({absent[:4].tolist()}); correct the policy"
        )
    return assignment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Share:
    """One simulated step: start, end and rollouts of each worker."""

    workers: NDArray[np.int64]
    started_s: NDArray[np.float64]
    ended_s: NDArray[np.float64]
    counts: NDArray[np.int64]
    num_stolen: int
    num_moved: int


class _Simulation:
    """The simulated steps so far."""

    def __init__(self, trace: Trace, cluster: Cluster) -> None:
        self._trace = trace
        self._cluster = cluster
        self._token_s = cluster.latency.token_s(cluster.num_slots)
        self._free = np.zeros(cluster.num_workers)
        self._sampled: list[float] = []
        self._trained: list[float] = []
        self._shares: list[_Share] = []

    def add(self, number: int, step: TraceStep, assignment: Assignment) -> None:
        """Simulates one more step."""
        cluster, latency = self._cluster, self._cluster.latency
        version = cluster.version_of(number)
        opened = self._trained[version - 1] if version else 0.0
        starts = np.maximum(self._free, opened) + (latency.load_s if version else 0.0)
        work = _queued_rollouts(step, assignment, cluster.num_workers)
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

    def timeline(self, policy: Policy) -> Timeline:
        """The result."""
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


def _queued_rollouts(step: TraceStep, assignment: Assignment, num_workers: int) -> StepRollouts:
    """The rollouts of a step in the queues of their workers."""
    queued = assignment.order[np.argsort(assignment.workers[assignment.order], kind="stable")]
    sizes = np.bincount(assignment.workers, minlength=num_workers)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    corrected = assignment.predicted_lengths
    predicted = step.forecast.lengths if corrected is None else corrected
    prompts = np.zeros_like(step.lengths) if step.num_prompt_tokens is None else step.num_prompt_tokens
    whole = Parts(np.arange(step.num_rollouts + 1), step.lengths, np.zeros(step.num_rollouts))
    parts = whole if step.turns is None else step.turns.parts()
    return StepRollouts(offsets, queued, step.lengths, predicted, prompts, *parts)
