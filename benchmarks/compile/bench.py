"""Claim: how long numba takes to compile what Treering needs on a new installation, function by function."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from numba.core import event

from benchmarks.common.progress import OnProgress, silent
from treering.cli.compile import parts

NOTE = "each part in a process with an empty cache, under a minute in all; seconds are those of one processor"
TABLES = {
    "parts": ("name", "seconds", "compiling_s", "num_functions"),
    "slowest": ("part", "function", "seconds", "num_types"),
}

Row = dict[str, Any]

_NUM_SHOWN = 20
MOST_S = 3.0
"""Seconds of a processor for a function of one type, without those that it calls; slower ones are failures."""


class Timer(event.Listener):  # type: ignore[misc]
    """Seconds of this process that numba takes for each function, without those that it calls."""

    def __init__(self) -> None:
        """Nothing compiled yet."""
        self.rows: list[Row] = []
        self._open: list[list[float]] = []

    def on_start(self, event: Any) -> None:
        """A function begins: [its start, seconds of the functions that it calls]."""
        self._open.append([time.process_time(), 0.0])

    def on_end(self, event: Any) -> None:
        """A function ends."""
        start, inner = self._open.pop()
        whole = time.process_time() - start
        function = event.data["dispatcher"].py_func
        self.rows.append({"function": f"{function.__module__}.{function.__qualname__}", "seconds": whole - inner})
        if self._open:
            self._open[-1][1] += whole


def measure(*, on_progress: OnProgress = silent) -> dict[str, Any]:
    """Compiles each part in a new process with an empty cache, so parts count alone what others need too.

    Failures are the functions that take more than `MOST_S` in every part that compiles them.
    """
    names, found = list(parts()), []
    for number, name in enumerate(names):
        on_progress(f"compiling {name}", number / len(names))
        found.append(_measure(name))
    slowest = sorted((row for part in found for row in part["functions"]), key=lambda row: -row["seconds"])
    failures = _slow(found)
    notes = [f"too slow to compile: {failure}" for failure in failures]
    return {"parts": found, "slowest": slowest[:_NUM_SHOWN], "failures": failures, "notes": notes}


def _slow(found: list[dict[str, Any]]) -> list[str]:
    fastest: dict[str, float] = {}
    for row in (row for part in found for row in part["functions"]):
        seconds = row["seconds"] / row["num_types"]
        fastest[row["function"]] = min(seconds, fastest.get(row["function"], seconds))
    return [f"{name}: {seconds:.1f} s" for name, seconds in fastest.items() if seconds > MOST_S]


def _measure(name: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.compile.bench", name]
        done = subprocess.run(
            command, env=environment, cwd=Path(__file__).parents[2], check=True, stdout=subprocess.PIPE
        )
    part: dict[str, Any] = json.loads(done.stdout)
    return part


def _in_this_process(name: str) -> dict[str, Any]:
    """The part's seconds, imports included, and its functions, those of several types once."""
    timer = Timer()
    with event.install_listener("numba:compile", timer):
        parts()[name]()
    functions: dict[str, Row] = {}
    for row in timer.rows:
        function = functions.setdefault(row["function"], {**row, "part": name, "seconds": 0.0, "num_types": 0})
        function["seconds"] += row["seconds"]
        function["num_types"] += 1
    slowest_first = sorted(functions.values(), key=lambda row: -row["seconds"])
    compiling_s = sum(row["seconds"] for row in slowest_first)
    counts = {"compiling_s": compiling_s, "num_functions": len(slowest_first)}
    return {"name": name, "seconds": time.process_time(), **counts, "functions": slowest_first}


if __name__ == "__main__":
    print(json.dumps(_in_this_process(sys.argv[1])))
