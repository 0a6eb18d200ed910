"""Clocks for the device benchmark: medians of CUDA events with cold caches, or of wall time without a device."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common.timing import cpu_name, versions, wall_seconds

FLUSH_BYTES = 2**29
"""Written between runs: ten times the cache of a Hopper device. It keeps the device busy for 0.2 ms, so that the
launches of a short run are queued when the run begins."""

MIN_RUNS, MAX_RUNS = 5, 30
RUN_SECONDS = 0.2
"""As many runs as fit into this time, within those limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """Median seconds of repeatable work on one kind of device.

    Example: `Stopwatch(device="cpu").median(work)` runs `work` once to warm up, then 5 to 30 times.
    """

    device: str
    min_runs: int = MIN_RUNS
    max_runs: int = MAX_RUNS

    def median(self, work: Callable[[], object]) -> float:
        """Median over runs, after a warm-up and, if the limits differ, one run that shows how many fit."""
        work()
        times = _event_seconds if self.device == "cuda" else _wall_seconds
        num_runs = self.max_runs
        if self.min_runs < self.max_runs:
            num_fitting = int(RUN_SECONDS / max(times(work, 1)[0], 1e-9))
            num_runs = max(self.min_runs, min(self.max_runs, num_fitting))
        return statistics.median(times(work, num_runs))


def environment(device: str, **more: Any) -> dict[str, Any]:
    """What the figures depend on besides the code."""
    cuda = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else cpu_name(),
        "versions": {**versions(), "cuda": torch.version.cuda if cuda else None},
        "clock": "CUDA events" if cuda else "wall time",
        **more,
    }


def _wall_seconds(work: Callable[[], object], num_runs: int) -> list[float]:
    return [wall_seconds(work) for _ in range(num_runs)]


def _event_seconds(work: Callable[[], object], num_runs: int) -> list[float]:
    """Seconds of each run; the host does not wait between runs."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_runs)]
    for start, stop in pairs:
        flush.zero_()
        start.record()
        work()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) / 1000 for start, stop in pairs]
