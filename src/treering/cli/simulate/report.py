"""Formats the results of `treering simulate`: one JSON object, or a table and a sentence."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from rich.table import Table

from treering.cli.display.panel import in_words
from treering.cli.display.tables import figures_table
from treering.schedule.compare import BY_LENGTH, ONE_STEP_OFF, SYNC, Result
from treering.schedule.predict.calibration import calibrate, group_ranks
from treering.schedule.traces.trace import Trace

OURS = "histopipe"
"""The policy that the sentence is about."""
_FIRST = (SYNC, ONE_STEP_OFF, OURS)
"""The policies that matter to most: the plain loop, one that samples ahead, and ours."""

_BAR_WIDTH = 12


def as_json(results: Sequence[Result], lower_bound_s: float) -> str:
    """The results as `{"lower_bound_s", "policies": [...]}`."""
    report = {"lower_bound_s": lower_bound_s, "policies": [asdict(result) for result in results]}
    return json.dumps(report, indent=2, allow_nan=False)


def as_table(results: Sequence[Result], *, title: str, num_seeds: int) -> Table:
    """A row per policy, the three of most interest first, with a bar as long as its speedup.

    With several seeds, it has the worst one's speedup too.
    """
    names = ["stale", "time", "of bound", "idle", "speedup", *(["worst"] if num_seeds > 1 else [])]
    table = figures_table(title, ["policy", *names])
    table.add_column("", no_wrap=True, overflow="crop")
    longest = max(result.speedup_over_sync for result in results)
    first = sorted((one for one in results if one.policy in _FIRST), key=lambda one: _FIRST.index(one.policy))
    others = [one for one in results if one.policy not in _FIRST]
    for result in [*first, *others]:
        style = "bold" if result.policy == OURS else None
        table.add_row(*_cells(result, longest, num_seeds), style=style, end_section=result is first[-1])
    return table


def answer(results: Sequence[Result]) -> str:
    """What the best policy gains, in a sentence; empty if only the synchronous policy ran.

    Example: "histopipe ends the run 1.62x as fast as the synchronous loop and 1.57x as fast as FIFO over random
    shards at staleness 1, at 0.91 of the lower bound; its workers decode nothing for 12 % of their time."
    """
    by_name = {result.policy: result for result in results}
    others = [result for result in results if result.policy != SYNC]
    if not others:
        return ""
    ours = by_name.get(OURS) or max(others, key=lambda result: result.speedup_over_sync)
    gains = [f"{ours.speedup_over_sync:.2f}x as fast as the synchronous loop"]
    plain = by_name.get(ONE_STEP_OFF)
    if plain is not None and plain is not ours:
        ratio = plain.makespan_s / ours.makespan_s
        gains.append(f"{ratio:.2f}x as fast as FIFO over random shards at staleness {plain.staleness}")
    by_length = by_name.get(BY_LENGTH)
    if by_length is not None and by_length is not ours:
        gains.append(f"{by_length.makespan_s / ours.makespan_s:.2f}x as fast as with forecasts of lengths alone")
    return (
        f"{ours.policy} ends the run {_listed(gains)}, at {ours.throughput_of_bound:.2f} of the lower bound; its "
        f"workers decode nothing for {ours.bubble:.0%} of their time."
    )


def _listed(parts: Sequence[str]) -> str:
    """Parts of a sentence with commas and an "and".

    >>> _listed(["a", "b", "c"]), _listed(["a", "b"])
    ('a, b and c', 'a and b')
    """
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


def about_predictions(trace: Trace) -> str:
    """How good a trace's predictions are, in a sentence."""
    predicted = np.concatenate([step.forecast.lengths for step in trace.steps])
    actual = np.concatenate([step.lengths for step in trace.steps])
    figures = calibrate(predicted, actual)
    sizes = np.array([step.num_rollouts for step in trace.steps])
    groups = [group_ranks(step.forecast.lengths, step.lengths) for step in trace.steps]
    moved_up = 1.0 - float(np.average([group.accurate for group in groups], weights=sizes))
    return (
        f"Predictions: sigma {figures.sigma:.2f} and bias {figures.bias:+.2f} of the log ratio, rank correlation "
        f"{figures.spearman:.2f}; {moved_up:.0%} of a step's rollouts are in a longer one of 8 groups than predicted."
        f"{_about_waits(trace)}"
    )


def _about_waits(trace: Trace) -> str:
    """The waiting of a rollout in the mean, in a sentence; empty if none waits."""
    turns = [step.turns for step in trace.steps if step.turns is not None]
    if not trace.has_waits:
        return ""
    counts = np.concatenate([each.num_turns for each in turns])
    waits = np.concatenate([each.total_wait_s for each in turns])
    return f" A rollout has {counts.mean():.1f} turns and waits for {as_time(float(waits.mean()))}, in the mean."


def as_time(time_s: float) -> str:
    """A time in the units of people, with at least three digits.

    >>> as_time(7.026), as_time(203.4), as_time(40_470)
    ('7.03 s', '3 min 23 s', '11 h 14 min')
    """
    return f"{time_s:.3g} s" if time_s < 100 else in_words(time_s)


def _cells(result: Result, longest: float, num_seeds: int) -> list[str]:
    worst = [f"{result.worst_speedup_over_sync:.2f}x"] if num_seeds > 1 else []
    return [
        result.policy,
        str(result.staleness),
        as_time(result.makespan_s),
        f"{result.throughput_of_bound:.2f}",
        f"{result.bubble:.0%}",
        f"{result.speedup_over_sync:.2f}x",
        *worst,
        f" {_bar(result.speedup_over_sync / longest)}",
    ]


def _bar(share: float) -> str:
    """A bar of that share of the full width, in eighths of a character.

    >>> _bar(0.25)
    '███'
    """
    eighths = round(share * _BAR_WIDTH * 8)
    return ("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8]).rstrip()
