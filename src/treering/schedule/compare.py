"""Simulates several policies on the same traces and reports each one's speedup over the synchronous loop."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from treering.errors import ConfigError
from treering.schedule.cluster import Cluster
from treering.schedule.policies import POLICIES, make_policy
from treering.schedule.simulator.run import simulate
from treering.schedule.simulator.timeline import Timeline
from treering.schedule.traces.trace import Trace

SYNC = "sync"
"""FIFO over random static shards with a barrier after each step: the baseline of speedups."""
SYNC_LONGEST_FIRST = "sync_longest_first"
"""Longest-first with a barrier after each step."""
ONE_STEP_OFF = "fifo"
"""One-step-off training without a scheduler: FIFO over random static shards."""
BY_LENGTH = "histopipe_by_length"
"""HistoPipe with forecasts of lengths alone, where rollouts wait too."""
_SYNCHRONOUS = {SYNC: ONE_STEP_OFF, SYNC_LONGEST_FIRST: "longest_first"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySetup:
    """A policy and the staleness that it runs at."""

    name: str
    """Name in reports."""
    policy: str
    """Of `treering.schedule.policies.POLICIES`."""
    staleness: int
    """Staleness of its cluster."""
    knows_waits: bool = False
    """Whether its forecasts have waiting, where rollouts wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Figures of one policy setup: means over the traces, and the worst.

    Example: makespans of 90 and 110 s where the synchronous loop took 180 and 165 s are a mean of 100 s, a speedup of
    1.75 and a worst one of 1.5.
    """

    policy: str
    """The setup's name."""
    makespan_s: float
    """Seconds until the end of the last update."""
    throughput_of_bound: float
    """Lower bound over makespan."""
    bubble: float
    """Share of the workers' time without decoding."""
    staleness_max: int
    """Largest staleness of any token."""
    speedup_over_sync: float
    """Makespan of `sync` over this one."""
    staleness: int
    """Staleness that it ran at."""
    bound_s: float
    """The lower bound at this staleness."""
    tokens_per_s: float
    """Sampled tokens of the run over its makespan."""
    num_stolen: float
    """Rollouts that started on another worker than the assigned one."""
    num_moved: float
    """Moves of running rollouts."""
    choices: tuple[str, ...]
    """The plan chosen for each step of the first trace, if the policy chooses among plans."""
    worst_throughput_of_bound: float
    """The least over the traces."""
    worst_speedup_over_sync: float
    """The least over the traces."""


def policy_setups(staleness: int, names: Sequence[str] | None = None, *, has_waits: bool = False) -> list[PolicySetup]:
    """The synchronous loops, and every other policy at a staleness.

    Args:
        staleness: of those that are not synchronous.
        names: those to include; `sync` is always included. None means all.
        has_waits: whether rollouts wait; all but histopipe then know lengths alone.

    Raises:
        ConfigError: an unknown name.

    Example: `policy_setups(1, ["histopipe"])` are sync at staleness 0 and histopipe at staleness 1.
    """
    everyone = [PolicySetup(name=name, policy=policy, staleness=0) for name, policy in _SYNCHRONOUS.items()]
    everyone += [
        PolicySetup(name=name, policy=name, staleness=staleness, knows_waits=name == "histopipe") for name in POLICIES
    ]
    if has_waits:
        everyone.append(PolicySetup(name=BY_LENGTH, policy="histopipe", staleness=staleness))
    known = [setup.name for setup in everyone]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ConfigError(f"policies are {', '.join(known)}, got {', '.join(unknown)}; choose among them")
    return [setup for setup in everyone if names is None or setup.name in (SYNC, *names)]


def compare(
    setups: Sequence[PolicySetup],
    cases: Iterable[tuple[Trace, Cluster]],
    on_run: Callable[[str], None] = lambda name: None,
) -> tuple[list[Result], list[Timeline]]:
    """Runs each setup on each trace.

    Args:
        setups: `sync` among them.
        cases: each a trace and the cluster that it runs on, whose staleness is replaced by the setup's.
        on_run: called with the name before each run.

    Returns:
        A result for each setup, in order, and the timelines of the first trace.
    """
    runs: list[list[Timeline]] = []
    for trace, cluster in cases:
        runs.append([])
        for setup in setups:
            on_run(setup.name)
            runs[-1].append(_run(setup, trace, cluster))
    by_name = {setup.name: [timelines[at] for timelines in runs] for at, setup in enumerate(setups)}
    return [_result(setup, by_name[setup.name], by_name[SYNC]) for setup in setups], runs[0]


def _run(setup: PolicySetup, trace: Trace, cluster: Cluster) -> Timeline:
    timeline = simulate(
        make_policy(setup.policy),
        trace if setup.knows_waits else _without_forecast_waits(trace),
        workers=replace(cluster, staleness=setup.staleness),
    )
    return replace(timeline, policy=setup.name)


def _without_forecast_waits(trace: Trace) -> Trace:
    """The same rollouts, which wait, with forecasts of lengths alone."""
    blind = [replace(step.forecast, num_turns=None, wait_s=None) for step in trace.steps]
    steps = [replace(step, forecast=forecast) for step, forecast in zip(trace.steps, blind, strict=True)]
    return replace(trace, steps=tuple(steps))


def _result(setup: PolicySetup, timelines: Sequence[Timeline], sync: Sequence[Timeline]) -> Result:
    speedups = [plain.makespan_s / own.makespan_s for plain, own in zip(sync, timelines, strict=True)]
    of_bound = [timeline.throughput_of_bound for timeline in timelines]
    return Result(
        policy=setup.name,
        makespan_s=_mean([timeline.makespan_s for timeline in timelines]),
        throughput_of_bound=_mean(of_bound),
        bubble=_mean([timeline.bubble for timeline in timelines]),
        staleness_max=max(timeline.staleness_max for timeline in timelines),
        speedup_over_sync=_mean(speedups),
        staleness=setup.staleness,
        bound_s=_mean([timeline.bound_s for timeline in timelines]),
        tokens_per_s=_mean([timeline.tokens_per_s for timeline in timelines]),
        num_stolen=_mean([timeline.num_stolen for timeline in timelines]),
        num_moved=_mean([timeline.num_moved for timeline in timelines]),
        choices=timelines[0].choices,
        worst_throughput_of_bound=min(of_bound),
        worst_speedup_over_sync=min(speedups),
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
