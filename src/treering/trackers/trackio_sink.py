"""Metrics in Trackio."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from treering.errors import StateError
from treering.extras import require
from treering.metrics import COLUMNS, COMPLETIONS, Completion, Number
from treering.trackers.identity import name_of


class TrackioSink:
    """A run of Trackio on this machine, with the metrics of each step under their own names.

    A resumed run goes on in the same run there. Trackio keeps its data in the folder of the variable TRACKIO_DIR; show
    them with `trackio show --project PROJECT`.

    Args:
        folder: of the run; its name begins the run's name there.
        project: where the run is shown.
        resume_step: the last step that the run keeps; None means a new run.
        settings: of the run, shown beside it.

    Raises:
        MissingExtraError: the package is not installed.
        StateError: it cannot begin.

    Example: `TrackioSink(Path("runs/a"), project="sums")` begins a run such as "a-5f0c2e91".
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        resume_step: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        require('metrics.sinks = ["trackio"]', "trackio")
        import trackio

        name = name_of(folder, "trackio", is_new=resume_step is None, stem=f"{folder.name}-")
        try:
            self._run = trackio.init(
                project=project,
                name=name,
                resume="allow",
                config=dict(settings or {}),
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        except Exception as error:  # the package has errors of many kinds
            raise StateError(
                f'Trackio cannot begin a run ({error}); check TRACKIO_DIR, or leave "trackio" out of metrics.sinks'
            ) from error
        self._table: Any = trackio.Table
        self._is_open = True

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        """Log the values of one step; the package stores them later, in a thread of its own."""
        self._run.log(dict(values), step=step)

    def write_completions(self, step: int, rows: Sequence[Completion]) -> None:
        """Log a table."""
        table = self._table(columns=list(COLUMNS), data=[list(astuple(row)) for row in rows])
        self._run.log({COMPLETIONS: table}, step=step)

    def close(self) -> None:
        """End the run there; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._run.finish()
