"""Learning curves: reward by step of the plain loop and of Treering's at staleness 0 and 1, from the same starts.

    python -m benchmarks.loop.curves --out FILE [--seeds 0 1 2]

A seed makes the policy, the prompts, their order and the noise. The plain loop packs sequences, drafts nothing and runs
in one process; Treering's has trees, drafts and two workers with histopipe. At staleness 0 both are the same training,
so their curves differ by rounding alone; staleness 1 may cost reward, and this shows how much.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common.progress import OnProgress, silent
from benchmarks.loop.bench import NUM_WORKERS, environment
from benchmarks.loop.runs import RunSize, Start, Variant, configuration, make_start, run_loop
from treering.cli.display.progress import WorkProgress
from treering.errors import InputError

SIZE = RunSize(num_prompts=128, prompts_per_step=16, num_steps=24)
LAST = 4
"""Steps whose mean is the final reward; as many at the beginning give the first reward."""
SHARE = 0.8
"""Of the plain loop's gain: the steps that each loop takes to it are counted."""
WINDOW = 3
"""Steps whose mean reward has to reach it."""


def _ours(staleness: int) -> Variant:
    return Variant(
        name=f"staleness {staleness}",
        layout="tree",
        drafts="on",
        workers=NUM_WORKERS,
        schedule="histopipe",
        staleness=staleness,
    )


SIDES = (Variant(name="plain"), _ours(0), _ours(1))

StartMaker = Callable[[Path, int], Start]
"""Makes the policy of a seed in a new folder."""


def measure(
    seeds: Sequence[int],
    *,
    size: RunSize = SIZE,
    make: StartMaker | None = None,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Rewards of each side by seed and step, and their summary; `make` makes the policy of a seed in a new folder.

    Raises:
        InputError: no seed, a seed twice, or fewer steps than twice those that a mean is taken of.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise InputError(f"curves take one or more different seeds, got {list(seeds)}; three or more show their spread")
    if size.num_steps < 2 * LAST:
        raise InputError(f"first and last rewards are means of {LAST} steps, got {size.num_steps} steps; raise them")
    rewards: dict[str, list[list[float]]] = {side.name: [] for side in SIDES}
    starts = []
    with tempfile.TemporaryDirectory() as name:
        for seed in seeds:
            folder = Path(name) / str(seed)
            if make is None:
                start = make_start(folder / "start", size.num_prompts, seed=seed, on_progress=on_progress)
            else:
                start = make(folder / "start", seed)
            starts.append(start)
            for side in SIDES:
                on_progress(f"seed {seed}: {side.name}")
                run = run_loop(configuration(start, size, side, seed=seed, run_dir=folder / side.name))
                rewards[side.name].append([_reward(report.rollouts.reward_mean) for report in run.reports])
    facts = environment(len(seeds), size, starts[0]) | {"seeds": list(seeds)}
    del facts["clock"], facts["first_timed_step"], facts["policy"]
    return {
        "sides": [{"side": asdict(side), "rewards": rewards[side.name]} for side in SIDES],
        "summary": {side.name: summarize(rewards[side.name], rewards["plain"]) for side in SIDES},
        "environment": facts | {"accuracies": [start.accuracy for start in starts]},
    }


def summarize(own: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]) -> dict[str, Any]:
    """First and last rewards of a side, and how soon it has most of what the plain loop gains.

    Args:
        own: rewards by seed and step.
        plain: those of the plain loop.

    Example: where the plain loop goes from 0.5 to 1.0, the step counts from which on the mean of three is 0.9.
    """
    last = [mean(curve[-LAST:]) for curve in own]
    reached = [_steps_to(curve, _target(base)) for curve, base in zip(own, plain, strict=True)]
    counted = [step for step in reached if step is not None]
    return {
        "first": mean(mean(curve[:LAST]) for curve in own),
        "last": mean(last),
        # Of the population of these seeds: with a single one it is 0.
        "last_deviation": float(np.std(last)),
        "last_of_seeds": last,
        "difference_to_plain": [value - mean(curve[-LAST:]) for value, curve in zip(last, plain, strict=True)],
        "steps_to_share": reached,
        "median_steps_to_share": median(counted) if len(counted) == len(reached) else None,
    }


def _target(plain: Sequence[float]) -> float:
    first, last = mean(plain[:LAST]), mean(plain[-LAST:])
    return first + SHARE * (last - first)


def _steps_to(curve: Sequence[float], target: float) -> int | None:
    """The first step at whose end the mean of the latest `WINDOW` is at the target; None where it never is."""
    for end in range(WINDOW, len(curve) + 1):
        if mean(curve[end - WINDOW : end]) >= target:
            return end
    return None


def _reward(value: float | None) -> float:
    assert value is not None, "every step has rollouts"
    return value


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
        print(
            f"{name}: reward {found['first']:.3f} to {found['last']:.3f} +- {found['last_deviation']:.3f}, "
            f"{SHARE:.0%} of the plain loop's gain after {found['median_steps_to_share']} steps (median)"
        )


if __name__ == "__main__":
    main()
