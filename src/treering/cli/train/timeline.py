"""Writes when each process of a run worked on each step, a line per process and step."""

import json
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from treering.rl.step_report import RlStepReport
from treering.step_lines import append, reopen
from treering.writing import check_regular, writing


class TimelineLog:
    """The file `timeline.jsonl` of a run with workers; use it in a `with` statement.

    Example: `{"step": 3, "worker": 1, "started_s": 1767261600.2, "ended_s": 1767261604.9, "busy_s": 4.5,
    "num_rollouts": 32}`; the trainer's line has the worker null.
    """

    def __init__(self, file: Path, *, resume_step: int | None) -> None:
        """Lines of steps after `resume_step`, or all if it is None, are removed: the run repeats these steps.

        Raises:
            StateError: the file cannot be read or written.
        """
        self._path = file
        with writing(file):
            check_regular(file)
        reopen([file], resume_step or 0, {}, log=file)
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = file.open("ab", buffering=0)

    def write(self, report: RlStepReport) -> None:
        """Appends the spans of one step.

        Raises:
            StateError: the disk is full.
        """
        spans = () if report.overlap is None else report.overlap.spans
        lines = [json.dumps({"step": report.step, **asdict(span)}).encode() + b"\n" for span in spans]
        with writing(self._path, sum(map(len, lines))):
            append(self._file, b"".join(lines))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
