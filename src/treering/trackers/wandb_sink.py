"""Metrics in Weights & Biases."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from treering.errors import StateError
from treering.extras import require
from treering.metrics import COLUMNS, COMPLETIONS, Completion, Number
from treering.trackers.identity import name_of


class WandbSink:
    """A run of Weights & Biases, with the metrics of each step under their own names.

    A resumed run goes on in the same run there. Steps that it repeats are there already, and are left as they are.

    Args:
        folder: of the run; its files go to `wandb/` below.
        project: where the run is shown.
        resume_step: the last step that the run keeps; None means a new run.
        settings: of the run, shown beside it.

    Raises:
        MissingExtraError: the package is not installed.
        StateError: it cannot begin, as without a login.

    Example: with the variable WANDB_MODE=offline it writes files only, which `wandb sync` sends later.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        resume_step: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        require('metrics.sinks = ["wandb"]', "wandb")
        import wandb

        name = name_of(folder, "wandb", is_new=resume_step is None)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project,
                id=name,
                name=folder.name,
                dir=str(folder),
                resume="allow",
                config=dict(settings or {}),
                settings=wandb.Settings(silent=True),
            )
        except Exception as error:  # the package has errors of many kinds
            raise StateError(
                f"Weights & Biases cannot begin a run ({error}); log in with `wandb login`, set WANDB_MODE=offline, or "
                'leave "wandb" out of metrics.sinks'
            ) from error
        self._table: Any = wandb.Table
        # The steps that a resumed run repeats would each print a warning.
        self._num_done = self._run.step if self._run.resumed else 0

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        """Log the values of one step; the package sends them later, in a process of its own."""
        if step >= self._num_done:
            self._run.log(dict(values), step=step, commit=True)

    def write_completions(self, step: int, rows: Sequence[Completion]) -> None:
        """Log a table, which is sent with the values of its step."""
        if step >= self._num_done:
            table = self._table(columns=list(COLUMNS), data=[list(astuple(row)) for row in rows])
            self._run.log({COMPLETIONS: table}, step=step, commit=False)

    def close(self) -> None:
        """End the run there; a second call does nothing."""
        self._run.finish()
