"""Clocks, and how steps are compared: interleaved, after a warm-up, by medians.

Interleaving exposes every step to the same noise; the median drops the worst moments of each.
"""

import difflib
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import treering
from treering.errors import InputError

Step = Callable[[], None]
Clock = Callable[[Step], float]
"""Seconds that one call of a step takes."""

OnRun = Callable[[int, int], None]
"""Told the number of finished rounds and of all."""


def process_seconds(step: Step) -> float:
    """CPU time of this process; other processes do not count."""
    start = time.process_time()
    step()
    return time.process_time() - start


def wall_seconds(step: Callable[[], object]) -> float:
    """Wall time: threads shorten it, and other processes lengthen it."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def cuda_seconds(step: Step) -> float:
    """Time on the device between two events, launch gaps included."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    step()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / 1000


def interleaved_medians(
    steps: Mapping[str, Step], num_runs: int, clock: Clock, on_run: OnRun | None = None
) -> dict[str, float]:
    """Median seconds of each step over `num_runs` rounds; see `interleaved_seconds`.

    Raises:
        InputError: fewer than one run.
    """
    seconds = interleaved_seconds(steps, num_runs, clock, on_run)
    return {name: statistics.median(times) for name, times in seconds.items()}


def check_runs(num_runs: int) -> None:
    """Refuses fewer rounds than one.

    Raises:
        InputError: with the number.
    """
    if num_runs < 1:
        raise InputError(f"a median needs at least one run, got {num_runs}: pass 5 or more for figures to publish")


def interleaved_seconds(
    steps: Mapping[str, Step], num_runs: int, clock: Clock, on_run: OnRun | None = None
) -> dict[str, list[float]]:
    """Seconds of each step in each of `num_runs` rounds, each of which runs every step once, in order.

    Steps are expected to be warm. Example: steps a and b over 2 rounds run as a b a b.

    Raises:
        InputError: fewer than one run.
    """
    check_runs(num_runs)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for done in range(num_runs):
        for name, step in steps.items():
            samples[name].append(clock(step))
        if on_run is not None:
            on_run(done + 1, num_runs)
    return samples


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, so that process time is the time of the computation; restored on exit."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def versions() -> dict[str, str]:
    """Versions that a figure depends on."""
    return {
        "treering": treering.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }


def environment(**more: Any) -> dict[str, Any]:
    """What the figures of a report depend on besides the code: versions, the processor, and what else is named."""
    return {"versions": versions(), "cpu": cpu_name(), **more}


def chosen(only: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names that are in `only`; all of them where it is empty.

    Raises:
        InputError: one that there is not, with the nearest ones.
    """
    for name in only:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names
            raise InputError(f"--only takes names of cases and sets, got {name!r}; nearest names: {', '.join(near)}")
    return [name for name in names if name in only or not only]


def cpu_name() -> str:
    """The processor's model name, or its architecture if the system does not name it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def print_report(report: Mapping[str, Any], out: Path | None) -> None:
    """Prints a report as JSON, after machine and versions, and writes it to a file if one is given."""
    text = json.dumps({"machine": cpu_name(), "versions": versions(), **report}, indent=2)
    print(text)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
