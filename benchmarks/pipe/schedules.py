"""Claim: histopipe comes near the lower bound, whether the longest rollouts rule or total work.

    python -m benchmarks.pipe.schedules [--out FILE] [--only TEXT]

Runs `treering simulate` on every case of docs/schedule.md, in virtual time: four sizes of a step, staleness 1
and 0. Results are written after each case; a case that the file has is skipped, so that the command goes on where it
was cut off. Takes about ten minutes.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SIZES = ("--rollouts 1024 --slots 64", "--rollouts 4096", "--rollouts 8192 --slots 64", "--rollouts 16384")
OUT = Path("benchmarks/results/simulate.json")


def commands() -> Iterator[str]:
    """What a user would type for every case."""
    for size in SIZES:
        yield f"treering simulate {size} --seeds 5"
        yield f"treering simulate {size} --staleness 0 --seeds 5"


def main() -> None:
    """Runs the cases that are missing."""
    parser = argparse.ArgumentParser(description="Every case of docs/schedule.md, simulated.")
    parser.add_argument("--out", type=Path, default=OUT, help=f"JSON, continued where it exists; {OUT}")
    parser.add_argument("--only", default="", help="cases whose command contains this text")
    arguments = parser.parse_args()
    found = json.loads(arguments.out.read_text(encoding="utf-8"))["cases"] if arguments.out.exists() else []
    known = {case["command"] for case in found}
    for command in (each for each in commands() if arguments.only in each and each not in known):
        print(command, file=sys.stderr)
        run = [sys.executable, "-m", *command.split(), "--json"]
        done = subprocess.run(run, check=True, stdout=subprocess.PIPE)
        found.append({"command": command, **json.loads(done.stdout)})
        report = {"note": "virtual time: no machine is measured", "cases": found}
        arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
