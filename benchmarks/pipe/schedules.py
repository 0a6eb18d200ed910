"""Claim: histopipe comes near the lower bound whichever rules, and wrong predictions cost it next to nothing.

    python -m benchmarks.pipe.schedules [--out FILE] [--only TEXT]

Runs `treering simulate` on every case of docs/schedule.md, in virtual time: four sizes of a step, three laws of
lengths, staleness 0, rollouts in groups whose lengths are as stable from epoch to epoch as in RhymeRL's tables, and
predictions and latencies that are wrong. Results are written after each case; a case that the file has is left out, so
that the command goes on where it was cut off. Takes about an hour.
"""

import argparse
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from treering.cli.display.progress import WorkProgress
from treering.cli.simulate.cases import make_cases
from treering.cli.simulate.options import SimulateOptions
from treering.cli.simulate.report import as_json
from treering.schedule.compare import compare, policy_setups
from treering.schedule.simulator.bounds import bound_s
from treering.schedule.traces.distort import Distortion

SIZES = ((1024, 64), (4096, 128), (8192, 64), (16384, 128))
"""Rollouts a step, slots a worker."""
LAWS = ("lognormal:8.2,0.8,16384", "exponential:5000,16384", "bimodal:2500,16000,0.1,0.3,16384")
STABILITIES = ((0.16, None), (0.28, None), (0.28, 0.24))
"""Shares of rollouts that move to a longer rank group, and of all that only cross a boundary."""
SMALL_SIZES = ((1024, 128), (2048, 64))
"""Of the controls, on 8 workers."""
DISTORTIONS: tuple[Distortion, ...] = ("reversed", "constant", "random")
SLOWER = (2.0, 0.5)

OUT = Path("benchmarks/results/simulate.json")


def cases() -> Iterator[SimulateOptions]:
    """Every case."""
    for rollouts, slots in SIZES:
        for law in LAWS:
            yield SimulateOptions(num_rollouts=rollouts, num_slots=slots, lengths=law, num_seeds=5)
        yield SimulateOptions(num_rollouts=rollouts, num_slots=slots, staleness=0, num_seeds=5)
        for stability, crossed in STABILITIES:
            for law in LAWS:
                yield SimulateOptions(
                    num_rollouts=rollouts,
                    num_slots=slots,
                    lengths=law,
                    stability=stability,
                    crossed=crossed,
                    num_seeds=3,
                )
    for rollouts, slots in SMALL_SIZES:
        for distortion in DISTORTIONS:
            yield SimulateOptions(
                num_workers=8, num_rollouts=rollouts, num_slots=slots, distort=distortion, num_seeds=20
            )
        for factor in SLOWER:
            yield SimulateOptions(
                num_workers=8, num_rollouts=rollouts, num_slots=slots, believed_latency=factor, num_seeds=20
            )


def command_of(options: SimulateOptions) -> str:
    """What a user would type.

    Example: `treering simulate --rollouts 1024 --slots 64 --staleness 0 --seeds 5`.
    """
    plain, words = SimulateOptions(), ["treering", "simulate"]
    for name, flag in _FLAGS.items():
        value = getattr(options, name)
        if value != getattr(plain, name):
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


_FLAGS = {
    "num_workers": "--workers",
    "num_rollouts": "--rollouts",
    "num_slots": "--slots",
    "lengths": "--lengths",
    "stability": "--stability",
    "crossed": "--crossed",
    "staleness": "--staleness",
    "distort": "--distort",
    "believed_latency": "--believed-latency",
    "num_seeds": "--seeds",
}


def measure(options: SimulateOptions) -> dict[str, Any]:
    """The report of one case: its command, and what `treering simulate --json` says."""
    traces = make_cases(options)
    results, _ = compare(policy_setups(options.staleness, None), traces)
    lower_bound_s = float(np.mean([bound_s(trace, cluster) for trace, cluster, _ in traces]))
    return {"command": command_of(options), **json.loads(as_json(results, lower_bound_s))}


def main() -> None:
    """Runs the cases that are missing."""
    parser = argparse.ArgumentParser(description="Every case of docs/schedule.md, simulated.")
    parser.add_argument("--out", type=Path, default=OUT, help=f"JSON, continued where it exists; {OUT}")
    parser.add_argument("--only", default="", help="cases whose command contains this text")
    arguments = parser.parse_args()
    wanted = [options for options in cases() if arguments.only in command_of(options)]
    found = json.loads(arguments.out.read_text(encoding="utf-8"))["cases"] if arguments.out.exists() else []
    known = {case["command"] for case in found}
    with WorkProgress(Console(stderr=True)) as progress:
        for number, options in enumerate(wanted):
            progress.show(f"{command_of(options)}, case {number + 1} of {len(wanted)}", number / len(wanted))
            if command_of(options) in known:
                continue
            found.append(measure(options))
            report = {"note": "virtual time: no machine is measured", "cases": found}
            arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
