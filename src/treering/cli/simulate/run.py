"""`treering simulate`: runs every policy on every case in virtual time, and prints or writes the results."""

import sys

import numpy as np
from rich.console import Console

from treering.cli.display.progress import WorkProgress
from treering.cli.simulate.cases import Case, make_cases
from treering.cli.simulate.options import SimulateOptions
from treering.cli.simulate.report import about_predictions, answer, as_json, as_table, as_time
from treering.errors import InputError
from treering.schedule.compare import PolicySetup, Result, compare, policy_setups
from treering.schedule.simulator.bounds import bound_s
from treering.schedule.simulator.timeline import Timeline
from treering.schedule.simulator.timeline_html import draw


def run(options: SimulateOptions) -> None:
    """Simulates, prints the results as JSON or as a table, and draws the timeline that was asked for.

    Raises:
        ConfigError: see `make_cases`; an unknown policy.
        InputError: see `make_cases`; a page that is a folder, or whose folder does not exist.
    """
    page = options.timeline
    if page is not None and not page.absolute().parent.is_dir():
        raise InputError(f"--timeline needs an existing folder, got {page}: create {page.parent} first")
    if page is not None and page.is_dir():
        raise InputError(f"--timeline names a file, got the folder {page}: add the name of a page")
    names = None if options.policies is None else [name.strip() for name in options.policies.split(",")]
    cases = make_cases(options)
    setups = policy_setups(options.staleness, names, has_waits=cases[0][0].has_waits)
    results, timelines = _compare(setups, cases)
    lower_bound_s = float(np.mean([bound_s(trace, cluster) for trace, cluster in cases]))
    if page is not None:
        page.write_text(draw(timelines, title=f"Simulated rollouts: {_setting(cases[0])}"), encoding="utf-8")
    if options.json_output:
        print(as_json(results, lower_bound_s))
    else:
        _show(results, cases, lower_bound_s)


def _compare(setups: list[PolicySetup], cases: list[Case]) -> tuple[list[Result], list[Timeline]]:
    num_runs, num_done = len(setups) * len(cases), 0

    def on_run(name: str) -> None:
        nonlocal num_done
        progress.show(f"{name}, run {num_done + 1} of {num_runs}", num_done / num_runs)
        num_done += 1

    with WorkProgress(Console(stderr=True)) as progress:
        return compare(setups, cases, on_run)


def _setting(case: Case) -> str:
    trace, cluster = case
    rollouts = sum(step.num_rollouts for step in trace.steps)
    steps = f"{len(trace.steps)} step{'s' if len(trace.steps) > 1 else ''}"
    return f"{rollouts:,} rollouts in {steps}, {cluster.num_workers:,} workers of {cluster.num_slots} slots"


def _show(results: list[Result], cases: list[Case], lower_bound_s: float) -> None:
    console = Console()
    trace, cluster = cases[0]
    seeds = f", mean of {len(cases)} seeds" if len(cases) > 1 else ""
    console.print(as_table(results, title=f"{_setting(cases[0])}{seeds}", num_seeds=len(cases)))
    bound = (
        f"No schedule of staleness {cluster.staleness} ends before {as_time(lower_bound_s)}. Each policy is held "
        "against the bound at its own staleness."
    )
    for sentence in (answer(results), bound, about_predictions(trace)):
        if sentence:
            console.print(sentence, highlight=False, soft_wrap=not sys.stdout.isatty())
