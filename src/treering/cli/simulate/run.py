"""`treering simulate`: runs every policy on every case in virtual time, and prints or writes the results."""

import sys
from pathlib import Path

import numpy as np
from rich.console import Console

from treering.cli.display.progress import WorkProgress
from treering.cli.simulate.cases import Case, SimulateOptions, make_cases
from treering.cli.simulate.report import about_predictions, answer, as_json, as_table, as_time
from treering.errors import InputError
from treering.schedule.compare import PolicySetup, Result, compare, policy_setups
from treering.schedule.simulator.bounds import bound_s
from treering.schedule.simulator.timeline import Timeline
from treering.schedule.simulator.timeline_html import draw


def run(
    options: SimulateOptions,
    *,
    policies: str | None,
    timeline: Path | None,
    out: Path | None,
    json_output: bool,
) -> None:
    """Simulates, prints the results as JSON or as a table, and writes the requested files.

    Args:
        options: what makes the cases.
        policies: comma-separated names; None means all.
        timeline: HTML file for a timeline of the first seed.
        out: file for the JSON.
        json_output: print one JSON object on stdout instead of the table.

    Raises:
        ConfigError: see `make_cases`; an unknown policy.
        InputError: see `make_cases`; a file whose folder does not exist.
    """
    for flag, file in (("--timeline", timeline), ("--out", out)):
        if file is not None and not file.absolute().parent.is_dir():
            raise InputError(f"{flag} needs an existing folder, got {file}: create {file.parent} first")
    names = None if policies is None else [name.strip() for name in policies.split(",")]
    cases = make_cases(options)
    setups = policy_setups(options.staleness, names, has_waits=cases[0][0].has_waits)
    results, timelines = _compare(setups, cases)
    lower_bound_s = float(np.mean([bound_s(trace, cluster) for trace, cluster, _ in cases]))
    text = as_json(results, lower_bound_s)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if timeline is not None:
        timeline.write_text(_picture(timelines, cases[0]), encoding="utf-8")
    if json_output:
        print(text)
        return
    _show(results, cases, lower_bound_s)


def _compare(setups: list[PolicySetup], cases: list[Case]) -> tuple[list[Result], list[Timeline]]:
    num_runs, num_done = len(setups) * len(cases), 0

    def on_run(name: str) -> None:
        nonlocal num_done
        progress.show(f"{name}, run {num_done + 1} of {num_runs}", num_done / num_runs)
        num_done += 1

    with WorkProgress(Console(stderr=True)) as progress:
        return compare(setups, cases, on_run)


def _picture(timelines: list[Timeline], case: Case) -> str:
    return draw(timelines, title=f"Simulated rollouts: {_setting(case)}")


def _setting(case: Case) -> str:
    trace, cluster, _ = case
    rollouts = sum(step.num_rollouts for step in trace.steps)
    steps = f"{len(trace.steps)} step{'s' if len(trace.steps) > 1 else ''}"
    return f"{rollouts:,} rollouts in {steps}, {cluster.num_workers:,} workers of {cluster.num_slots} slots"


def _show(results: list[Result], cases: list[Case], lower_bound_s: float) -> None:
    console = Console()
    trace, cluster, _ = cases[0]
    seeds = f", mean of {len(cases)} seeds" if len(cases) > 1 else ""
    console.print(as_table(results, title=f"{_setting(cases[0])}{seeds}", num_seeds=len(cases)))
    bound = (
        f"No schedule of staleness {cluster.staleness} ends before {as_time(lower_bound_s)}. Each policy is held "
        "against the bound at its own staleness."
    )
    for sentence in (answer(results), bound, about_predictions(trace)):
        if sentence:
            console.print(sentence, highlight=False, soft_wrap=not sys.stdout.isatty())
