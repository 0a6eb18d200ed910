"""When each process of a run worked on each step, as its folder says."""

from pathlib import Path
from typing import Any

from treering.files.step_lines import read_rows
from treering.report.run import number

TIMELINE_FILE = "timeline.jsonl"
_SECONDS = ("started_s", "ended_s", "busy_s")


def read_timeline(folder: Path) -> list[dict[str, Any]]:
    """The spans of a run, in order; empty if it has no workers. Damaged lines are left out.

    Each has "step", "worker" (None for the trainer), "started_s", "ended_s" and "busy_s" in seconds of `time.time`, and
    "num_rollouts".

    Example: a step of two workers has three spans, that of the trainer last.
    """
    return [row for row in read_rows(folder / TIMELINE_FILE) if _is_span(row)]


def _is_span(row: dict[str, Any]) -> bool:
    worker = row.get("worker")
    return (worker is None or isinstance(worker, int)) and all(number(row.get(name)) is not None for name in _SECONDS)
