"""The log of a run's processes has a line per process and step, and repeats none when the run resumes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from treering.cli.train.logs import TimelineLog
from treering.report.timeline import TIMELINE_FILE, read_timeline
from treering.rl.step_report import WorkerSpan


def report(step: int, *workers: int | None) -> Any:
    """The part of a step's report that the log reads."""
    spans = tuple(
        WorkerSpan(worker=worker, started_s=10.0 * step, ended_s=10.0 * step + 5, busy_s=4.0, num_rollouts=6)
        for worker in workers
    )
    return SimpleNamespace(step=step, overlap=SimpleNamespace(spans=spans))


def places(folder: Path) -> list[tuple[int, int | None]]:
    return [(span["step"], span["worker"]) for span in read_timeline(folder)]


def test_a_resumed_run_repeats_no_line(tmp_path: Path) -> None:
    with TimelineLog(tmp_path / TIMELINE_FILE, resume_step=None) as log:
        for step in (1, 2, 3):
            log.write(report(step, 0, None))
    with (tmp_path / TIMELINE_FILE).open("a") as torn:
        torn.write('{"step": 4, "wor')
    with TimelineLog(tmp_path / TIMELINE_FILE, resume_step=2) as log:
        log.write(report(3, 0, None))
    assert places(tmp_path) == [(1, 0), (1, None), (2, 0), (2, None), (3, 0), (3, None)]
