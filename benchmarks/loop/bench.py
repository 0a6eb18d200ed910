"""Claim: the loop's parts, trees, drafts, processes and overlap, shorten a step, each alone and all together.

`python -m benchmarks loop` trains the demo's policy on its task with the plain synchronous loop (packed sequences, no
drafts, one process), with each part alone, and with all of them. Prompts, seeds and numbers of steps are equal; runs
take turns; wall time. The report compares the product of the parts' factors with the measured whole, and has a ladder
whose factors multiply to the whole.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.timing import check_runs
from benchmarks.common.timing import environment as common_environment
from benchmarks.loop.runs import LoopRun, RunSize, Start, Variant, configuration, count_differing, make_start, run_loop

NOTE = "about ten minutes, one of which trains the small policy that is trained on"
TABLES = {
    "variants": ("variant.name", "step_s", "speedup", "shares"),
    "product": ("factors", "product", "whole", "ladder"),
}

SEED = 0
NUM_WORKERS = 2

_TREE: dict[str, Any] = {"layout": "tree"}
_DRAFTS: dict[str, Any] = {"drafts": "on"}
_RUNTIME: dict[str, Any] = {"workers": NUM_WORKERS, "schedule": "fifo"}
_OVERLAP: dict[str, Any] = _RUNTIME | {"schedule": "histopipe", "staleness": 1}

VARIANTS = (
    Variant(name="plain"),
    Variant(name="tree", **_TREE),
    Variant(name="drafts", **_DRAFTS),
    Variant(name="runtime", **_RUNTIME),
    Variant(name="histopipe", **_OVERLAP),
    Variant(name="tree+drafts", **_TREE, **_DRAFTS),
    Variant(name="tree+drafts+runtime", **_TREE, **_DRAFTS, **_RUNTIME),
    Variant(name="all", **_TREE, **_DRAFTS, **_OVERLAP),
)
_LADDER = {"tree": "tree", "drafts": "tree+drafts", "runtime": "tree+drafts+runtime", "overlap": "all"}
"""The parts, added one after another."""


def measure(
    *,
    num_runs: int = 3,
    size: RunSize | None = None,
    start: Start | None = None,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Every variant from a start, or from the demo's policy, and the product of their gains."""
    check_runs(num_runs)
    size = size or RunSize()
    with tempfile.TemporaryDirectory() as folder:
        start = start or make_start(Path(folder) / "start", size.num_prompts, seed=SEED, on_progress=on_progress)
        runs = _run_all(start, size, num_runs, Path(folder), on_progress)
    rows = {variant.name: _row(variant, runs, size) for variant in VARIANTS}
    product = multiply({name: row["step_s"] for name, row in rows.items()})
    return {
        "variants": list(rows.values()),
        "product": product,
        "notes": _notes(rows, product),
        "environment": environment(num_runs, size, start) | {"workers": NUM_WORKERS},
    }


def environment(num_runs: int, size: RunSize, start: Start) -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        **common_environment(),
        "num_processors": os.cpu_count(),
        "load_average": list(os.getloadavg()),
        "clock": "wall time",
        "runs": num_runs,
        "size": asdict(size),
        "first_timed_step": size.steps_per_epoch + 1,
        "policy": {"warm_start_steps": start.num_steps, "accuracy": start.accuracy},
    }


def _run_all(
    start: Start, size: RunSize, num_runs: int, folder: Path, on_progress: OnProgress
) -> dict[str, list[LoopRun]]:
    runs: dict[str, list[LoopRun]] = {variant.name: [] for variant in VARIANTS}
    for done in range(num_runs):
        for variant in VARIANTS:
            on_progress(f"run {done + 1} of {num_runs}: {variant.name}")
            run_dir = folder / f"{variant.name}-{done}"
            runs[variant.name].append(run_loop(configuration(start, size, variant, seed=SEED, run_dir=run_dir)))
    return runs


def _row(variant: Variant, runs: Mapping[str, Sequence[LoopRun]], size: RunSize) -> dict[str, Any]:
    own, first = runs[variant.name], size.steps_per_epoch
    plain_s = median(run.step_s(first) for run in runs["plain"])
    step_s = median(run.step_s(first) for run in own)
    phases = {name: median(_phase_s(run, name, first) for run in own) for name in ("rollout_s", "train_s", "update_s")}
    reports = [report for run in own for report in run.reports[first:]]
    num_rows = sum(report.engine.num_rows for report in reports)
    return {
        "variant": asdict(variant),
        "step_s": step_s,
        "step_s_of_runs": [run.step_s(first) for run in own],
        **phases,
        "speedup": plain_s / step_s,
        "shares": shares(own, first),
        "tokens_per_forward": sum(report.engine.num_sampled for report in reports) / num_rows,
        # Steps of different weights sample different tokens.
        "num_differing": None if variant.staleness else count_differing(own[0], runs["plain"][0]),
        "num_rollouts": sum(len(step) for step in own[0].latest),
    }


def shares(runs: Sequence[LoopRun], first: int) -> dict[str, float]:
    """Shares of the wall time of steps, medians over runs.

    rollout, train and update add up to more than 1 where they overlap. trainer_waits is the share in which nothing is
    trained, engines_wait that in which a worker (without workers: the engine) samples nothing.
    """
    found = []
    for run in runs:
        seconds = {name: _phase_s(run, f"{name}_s", first) for name in ("rollout", "train", "update")}
        share = {name: value / run.step_s(first) for name, value in seconds.items()}
        overlaps = [report.overlap for report in run.reports[first:] if report.overlap is not None]
        idle = sum(each.bubble for each in overlaps) / len(overlaps) if overlaps else 1.0 - share["rollout"]
        found.append(share | {"trainer_waits": 1.0 - share["train"] - share["update"], "engines_wait": idle})
    return {name: median(each[name] for each in found) for name in found[0]}


def multiply(step_s: Mapping[str, float]) -> dict[str, Any]:
    """The parts' factors over the plain loop, their product, and what all parts gain together.

    Args:
        step_s: seconds of a step by name of the variant.

    Returns:
        "factors" of each part alone, where "overlap" is added to "runtime", which it needs; their "product"; the
        measured "whole"; "whole_of_product"; and the "ladder" of factors of each part on top of those before it, which
        multiply to the whole.

    Example: steps of 8 s, 4 s with trees alone and 5 s with drafts alone have the factors 2 and 1.6. Where both
    together take 3 s, the whole is 2.67, the ladder 2 and 1.33.
    """
    factors = {name: step_s["plain"] / step_s[name] for name in ("tree", "drafts", "runtime")}
    factors["overlap"] = step_s["runtime"] / step_s["histopipe"]
    steps = [step_s[name] for name in ("plain", *_LADDER.values())]
    product, whole = prod(factors.values()), steps[0] / steps[-1]
    return {
        "factors": factors,
        "product": product,
        "whole": whole,
        "whole_of_product": whole / product,
        "ladder": {name: before / after for name, (before, after) in zip(_LADDER, pairwise(steps), strict=True)},
    }


def _phase_s(run: LoopRun, name: str, first: int) -> float:
    """Seconds of a phase in a step, the mean."""
    reports = run.reports[first:]
    return sum(getattr(report.phases, name) for report in reports) / len(reports)


def _notes(rows: Mapping[str, Mapping[str, Any]], product: Mapping[str, Any]) -> list[str]:
    notes = [
        f"together {product['whole']:.2f}x, the product of the parts is {product['product']:.2f}x: a part shortens one "
        "phase, and its factor for the whole step holds only while that phase has its share of the plain loop",
        f"{NUM_WORKERS} workers, a trainer, a reward worker and a controller share {os.cpu_count()} processors: overlap"
        " gains only where a processor would be idle",
    ]
    differing = {name: row["num_differing"] for name, row in rows.items() if row["num_differing"]}
    if differing:
        listed = ", ".join(f"{name} {count} of {rows[name]['num_rollouts']}" for name, count in differing.items())
        notes.append(
            f"rollouts with other tokens than the plain loop's at staleness 0: {listed}; float32 sums in another order "
            "change weights in the last digit, and so near-ties"
        )
    return notes
