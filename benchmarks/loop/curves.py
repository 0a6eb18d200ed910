"""Learning curves: reward by step of the plain loop and of Treering's at staleness 0 and 1, from the same starts.

    python -m benchmarks.loop.curves --out FILE [--seeds 0 1 2]

A seed makes the policy, the prompts, their order and the noise. The plain loop packs sequences, drafts nothing and runs
in one process; Treering's has trees, drafts and two workers with histopipe. At staleness 0 both are the same training,
so their curves differ by rounding alone; staleness 1 may cost reward, and this shows how much.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.tables import in_words
from benchmarks.loop.bench import NUM_WORKERS, environment
from benchmarks.loop.runs import RunSize, Variant, configuration, make_start, run_loop
from treering.cli.display import WorkProgress
from treering.errors import InputError

SIZE = RunSize(num_prompts=128, prompts_per_step=16, num_steps=24)
LAST = 4
"""Steps whose mean is the final reward; as many at the beginning give the first reward."""
SHARE = 0.8
"""Share of the plain loop's gain to which the steps of each loop are counted."""
WINDOW = 3
"""Steps whose mean reward has to reach it."""

_OURS: dict[str, Any] = {"layout": "tree", "drafts": "on", "workers": NUM_WORKERS, "schedule": "histopipe"}
SIDES = (
    Variant(name="plain"),
    *(Variant(name=f"staleness {staleness}", staleness=staleness, **_OURS) for staleness in (0, 1)),
)


def measure(seeds: Sequence[int], *, size: RunSize = SIZE, on_progress: OnProgress = silent) -> dict[str, Any]:
    """Rewards of each side by seed and step, and their summary.

    Raises:
        InputError: no seed, or a seed twice.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise InputError(f"curves take one or more different seeds, got {list(seeds)}; three or more show their spread")
    rewards: dict[str, list[list[float]]] = {side.name: [] for side in SIDES}
    starts = []
    with tempfile.TemporaryDirectory() as name:
        for seed in seeds:
            folder = Path(name) / str(seed)
            start = make_start(folder / "start", size.num_prompts, seed=seed, on_progress=on_progress)
            starts.append(start)
            for side in SIDES:
                on_progress(f"seed {seed}: {side.name}")
                run = run_loop(configuration(start, size, side, seed=seed, run_dir=folder / side.name))
                rewards[side.name].append([float(report.rollouts.reward_mean or 0.0) for report in run.reports])
    facts = {"seeds": list(seeds), "accuracies": [start.accuracy for start in starts]}
    return {
        "sides": [{"side": asdict(side), "rewards": rewards[side.name]} for side in SIDES],
        "summary": {side.name: summarize(rewards[side.name], rewards["plain"]) for side in SIDES},
        "environment": environment(len(seeds), size, starts[0]) | facts,
    }


def summarize(own: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]) -> dict[str, Any]:
    """First and last rewards of a side by seed and step, and how soon it has most of what the plain loop gains.

    Example: where the plain loop goes from 0.5 to 1.0, the step counts from which on the mean of three is 0.9.
    """
    last = [mean(curve[-LAST:]) for curve in own]
    reached = [_steps_to(curve, base) for curve, base in zip(own, plain, strict=True)]
    return {
        "first": mean(mean(curve[:LAST]) for curve in own),
        "last": mean(last),
        # Deviation of the population of these seeds: with a single one it is 0.
        "last_deviation": float(np.std(last)),
        "last_of_seeds": last,
        "difference_to_plain": [value - mean(curve[-LAST:]) for value, curve in zip(last, plain, strict=True)],
        "steps_to_share": reached,
        "median_steps_to_share": None if None in reached else median(step for step in reached if step is not None),
    }


def _steps_to(curve: Sequence[float], plain: Sequence[float]) -> int | None:
    """The first step at whose end the mean of the latest `WINDOW` is at the target; None where it never is."""
    first, last = mean(plain[:LAST]), mean(plain[-LAST:])
    ends = range(WINDOW, len(curve) + 1)
    return next((end for end in ends if mean(curve[end - WINDOW : end]) >= first + SHARE * (last - first)), None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the arguments, measures, writes JSON and prints the summary."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop.curves", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="for the JSON")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="0 1 2")
    given = parser.parse_args(arguments)
    try:
        with WorkProgress(Console(stderr=True)) as progress:
            report = measure(given.seeds, on_progress=progress.show)
    except InputError as error:
        parser.error(str(error))
    given.out.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    for name, found in report["summary"].items():
        print(f"{name}: {in_words(found)}")


if __name__ == "__main__":
    main()
