"""Run `treering simulate`: every scheduling policy on every case, in virtual time."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from treering.cli.display import PlainConsole, WorkProgress, duration, figures_table
from treering.errors import ConfigError, InputError, plural
from treering.schedule.cluster import Cluster, linear_latency
from treering.schedule.histopipe import POLICIES, make_policy
from treering.schedule.rehearsed import RehearsedTimeline, choose_rehearsals, draw_changes, simulate_rehearsed
from treering.schedule.simulator import Timeline, bound_s, with_training
from treering.schedule.simulator import simulate as simulate_policy
from treering.schedule.traces import Trace, read_trace, synthetic_trace

if TYPE_CHECKING:
    from treering.cli.simulate import SimulateOptions

SYNC = "sync"
"""FIFO over random static shards with a barrier after each step: the baseline of speedups."""

ONE_STEP_OFF = "fifo"
"""One-step-off training without a scheduler: FIFO over random static shards."""

OURS = "histopipe"
"""Policy that the summary sentence is about."""

REHEARSED = "rehearsed"
"""The synchronous loop with rehearsals."""

LENGTHS = "lognormal:8.2,0.8,16384"
NOISE = 0.25
ROLLOUTS = 4096
STEPS = 12
"""Defaults of options that are None unless given."""

Case = tuple[Trace, Cluster]
"""A trace and its workers."""

Row = dict[str, Any]
"""Figures of one policy: means over the cases, and the worst."""


def run(options: "SimulateOptions") -> None:
    """Simulate every policy on every case, and print the results as JSON or as a table.

    Raises:
        ConfigError, InputError: as for `make_cases`.
    """
    cases = make_cases(options)
    rows = compare(options.staleness, cases, rehearse=options.rehearse)
    lower_bound_s = float(np.mean([bound_s(trace, cluster) for trace, cluster in cases]))
    if options.json_output:
        print(json.dumps({"lower_bound_s": lower_bound_s, "policies": rows}, indent=2, allow_nan=False))
        return
    console = PlainConsole()
    trace, cluster = cases[0]
    num_rollouts = sum(step.num_rollouts for step in trace.steps)
    title = (
        f"{num_rollouts:,} rollouts in {plural(len(trace.steps), 'step')}, {cluster.num_workers:,} workers of "
        f"{cluster.num_slots} slots"
    )
    seeds = f", mean of {len(cases)} seeds" if len(cases) > 1 else ""
    console.print(as_table(rows, title=f"{title}{seeds}", num_seeds=len(cases)))
    bound = (
        f"No schedule of staleness {cluster.staleness} ends before {as_time(lower_bound_s)}. Each policy is compared "
        "with the bound at its own staleness."
    )
    about_rehearsals = [] if options.rehearse is None else [answer_of_rehearsals(rows, options.rehearse)]
    for sentence in (answer(rows), *about_rehearsals, bound):
        console.print(sentence)


def make_cases(options: "SimulateOptions") -> list[Case]:
    """Make traces, from a log or a length distribution, and their workers: one case per seed; a log has one.

    Raises:
        ConfigError: options contradict each other, or a value is out of range.
        InputError: a file, distribution or latency cannot be read.
    """
    if not (isfinite(options.training) and options.training >= 0):
        raise ConfigError(f"--training must be a share of at least 0, got {options.training!r}")
    try:
        step_ms, row_ms = (float(part) for part in options.decode.split(","))
    except ValueError as error:
        raise InputError(
            "--decode must be STEP,ROW, the milliseconds of a decode step and of one more row, such as 20,0.05, got "
            f"{options.decode!r}"
        ) from error
    latency = linear_latency(
        step_s=step_ms / 1000, row_s=row_ms / 1000, prefill_s=options.prefill_ms / 1000, load_s=options.load_s
    )
    if options.file is None:
        traces = [
            synthetic_trace(
                LENGTHS if options.lengths is None else options.lengths,
                num_steps=options.num_steps or STEPS,
                num_rollouts=options.num_rollouts or ROLLOUTS,
                noise=NOISE if options.noise is None else options.noise,
                seed=seed,
            )
            for seed in range(options.num_seeds or 1)
        ]
    else:
        of_laws = {"lengths": options.lengths, "noise": options.noise, "seeds": options.num_seeds}
        given = [f"--{name}" for name, value in of_laws.items() if value is not None]
        if given:
            raise ConfigError(f"FILE has its own rollouts, but {', '.join(given)} generates some; remove one of them")
        logged = read_trace(options.file, num_rollouts=options.num_rollouts, staleness=options.staleness)
        traces = [Trace(steps=logged.steps[: options.num_steps], max_tokens=logged.max_tokens)]
    cases = []
    for trace in traces:
        cluster = Cluster(
            num_workers=options.num_workers,
            num_slots=options.num_slots,
            max_tokens=trace.max_tokens,
            staleness=options.staleness,
            latency=latency,
        )
        cases.append((trace, with_training(cluster, trace, options.training)))
    return cases


def compare(staleness: int, cases: Sequence[Case], *, rehearse: float | None = None) -> list[Row]:
    """Run `sync`, which is FIFO at staleness 0, and each policy at a staleness on each case.

    `rehearse`, the chance of a change, adds the synchronous loop with rehearsals.

    Example: makespans of 90 and 110 s where the synchronous loop took 180 and 165 s are a row with a mean of 100 s, a
    speedup of 1.75 and a worst one of 1.5.
    """
    setups = {SYNC: (ONE_STEP_OFF, 0), **{name: (name, staleness) for name in POLICIES}}
    runs: dict[str, list[Timeline]] = {name: [] for name in setups}
    rehearsed: list[RehearsedTimeline] = []
    with WorkProgress(PlainConsole(stderr=True)) as progress:
        count = progress.counting("simulating", (len(setups) + (rehearse is not None)) * len(cases))
        for seed, (trace, cluster) in enumerate(cases):
            for name, (policy, own_staleness) in setups.items():
                # If rollouts wait, only histopipe knows for how long; the others know only lengths.
                known = trace if policy == OURS else _without_forecast_waits(trace)
                workers = replace(cluster, staleness=own_staleness)
                runs[name].append(simulate_policy(make_policy(policy), known, workers=workers))
                count(1)
            if rehearse is not None:
                # Seeds of the chosen's own draws are far from those of the run.
                chosen = choose_rehearsals(trace, cluster, change=rehearse, seed=1_000_000 + seed)
                changes = draw_changes(trace, rehearse, seed=seed)
                rehearsed.append(simulate_rehearsed(trace, cluster, chosen, rehearse, changes))
                count(1)
    rows = [_row(name, setups[name][1], timelines, runs[SYNC]) for name, timelines in runs.items()]
    if rehearsed:
        sampled, early, kept = (
            sum(int(np.sum(getattr(timeline, name))) for timeline in rehearsed)
            for name in ("num_tokens", "num_rehearsed", "num_kept")
        )
        shares = {"rehearsed_share": early / sampled, "kept_share": kept / early if early else None}
        rows.append({**_row(REHEARSED, 0, rehearsed, runs[SYNC]), **shares})
    return rows


def _without_forecast_waits(trace: Trace) -> Trace:
    blind = [replace(step.forecast, num_turns=None, wait_s=None) for step in trace.steps]
    steps = [replace(step, forecast=forecast) for step, forecast in zip(trace.steps, blind, strict=True)]
    return replace(trace, steps=tuple(steps))


def _row(name: str, staleness: int, timelines: Sequence[Timeline], sync: Sequence[Timeline]) -> Row:
    speedups = [plain.makespan_s / own.makespan_s for plain, own in zip(sync, timelines, strict=True)]
    means = ("makespan_s", "throughput_of_bound", "bubble", "bound_s", "tokens_per_s", "num_stolen", "num_moved")
    return {
        "policy": name,
        "staleness": staleness,
        "staleness_max": max(timeline.staleness_max for timeline in timelines),
        **{each: float(np.mean([getattr(timeline, each) for timeline in timelines])) for each in means},
        "speedup_over_sync": float(np.mean(speedups)),
        "worst_throughput_of_bound": min(timeline.throughput_of_bound for timeline in timelines),
        "worst_speedup_over_sync": min(speedups),
        # The chosen chosen for each step of the first trace, if the policy chooses among plans.
        "choices": timelines[0].choices,
    }


def as_table(rows: Sequence[Row], *, title: str, num_seeds: int) -> Table:
    """Make a table with a row per policy; for several seeds also the worst speedup."""
    names = ["stale", "time", "of bound", "idle", "speedup", *(["worst"] if num_seeds > 1 else [])]
    table = figures_table(title, ["policy", *names])
    for row in rows:
        cells = [
            row["policy"],
            str(row["staleness"]),
            as_time(row["makespan_s"]),
            f"{row['throughput_of_bound']:.2f}",
            f"{row['bubble']:.0%}",
            f"{row['speedup_over_sync']:.2f}x",
            *([f"{row['worst_speedup_over_sync']:.2f}x"] if num_seeds > 1 else []),
        ]
        table.add_row(*cells, style="bold" if row["policy"] == OURS else None)
    return table


def answer(rows: Sequence[Row]) -> str:
    """Summarise in a sentence what histopipe gains.

    Example: "histopipe ends the run 1.62x as fast as the synchronous loop and 1.57x as fast as FIFO over random
    shards at staleness 1, at 0.91 of the lower bound; its workers are idle for 12% of their time."
    """
    by_name = {row["policy"]: row for row in rows}
    ours, plain = by_name[OURS], by_name[ONE_STEP_OFF]
    return (
        f"{OURS} ends the run {ours['speedup_over_sync']:.2f}x as fast as the synchronous loop and "
        f"{plain['makespan_s'] / ours['makespan_s']:.2f}x as fast as FIFO over random shards at staleness "
        f"{plain['staleness']}, at {ours['throughput_of_bound']:.2f} of the lower bound; its workers are idle "
        f"for {ours['bubble']:.0%} of their time."
    )


def answer_of_rehearsals(rows: Sequence[Row], change: float) -> str:
    """Summarise in a sentence what rehearsals gain.

    Example: "rehearsed ends the run 1.50x as fast as the synchronous loop, on-policy, if a token changes with a chance
    of 2e-05; 14% of the tokens were sampled early, and 96% of these kept. Its bound is that of these changes."
    """
    (row,) = (row for row in rows if row["policy"] == REHEARSED)
    kept = "" if row["kept_share"] is None else f", and {row['kept_share']:.0%} of these kept"
    return (
        f"{REHEARSED} ends the run {row['speedup_over_sync']:.2f}x as fast as the synchronous loop, on-policy, if a "
        f"token changes with a chance of {change:.2g}; {row['rehearsed_share']:.0%} of the tokens were sampled early"
        f"{kept}. Its bound is that of these changes."
    )


def as_time(time_s: float) -> str:
    """Write a time in readable units, with at least three digits.

    >>> as_time(7.026), as_time(203.4), as_time(40_470)
    ('7.03 s', '3 min 23 s', '11 h 14 min')
    """
    return f"{time_s:.3g} s" if time_s < 100 else duration(time_s)
