"""Metrics in MLflow."""

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

from treering.errors import StateError
from treering.extras import require
from treering.metrics import COLUMNS, COMPLETIONS, Completion, Number
from treering.trackers.identity import read_names, write_name

_MAX_VALUE = 500
"""Characters of a parameter."""
_MAX_BATCH = 100
"""Parameters of one call."""


class MlflowSink:
    """A run of MLflow, with the metrics of each step under their own names.

    A resumed run goes on in the same run there. The server or folder is that of the variable MLFLOW_TRACKING_URI.

    Args:
        folder: of the run; its name is the run's name there.
        project: the experiment, made if it is new.
        resume_step: the last step that the run keeps; None means a new run.
        settings: of the run, stored as parameters such as "rl.group_size".

    Raises:
        MissingExtraError: the package is not installed.
        StateError: it cannot begin, as without a server.

    Example: `MLFLOW_TRACKING_URI=sqlite:///mlflow.db treering train config.toml 'metrics.sinks=["jsonl", "mlflow"]'`
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        resume_step: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        require('metrics.sinks = ["mlflow"]', "mlflow")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric: Any = Metric
        self._has_failed = False
        self._client: Any = MlflowClient()
        known = None if resume_step is None else read_names(folder).get("mlflow")
        try:
            self._run_id = known or self._begin(folder, project)
            self._client.update_run(self._run_id, status="RUNNING")
            if known is None:
                parameters = [Param(name, str(value)[:_MAX_VALUE]) for name, value in _flat(settings or {})]
                for first in range(0, len(parameters), _MAX_BATCH):
                    self._client.log_batch(self._run_id, params=parameters[first : first + _MAX_BATCH])
        except Exception as error:  # the package has errors of many kinds
            raise StateError(
                f'MLflow cannot begin a run ({error}); check MLFLOW_TRACKING_URI, or leave "mlflow" out of '
                "metrics.sinks"
            ) from error

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        """Store the values of one step; a server that does not answer costs a warning, and the run goes on."""
        now = int(1000 * time.time())
        points = [self._metric(name, float(value), now, step) for name, value in values.items()]
        with self._trying(step):
            self._client.log_batch(self._run_id, metrics=points)

    def write_completions(self, step: int, rows: Sequence[Completion]) -> None:
        """Store a table, the artifact `completions/step-000123.json`; errors as in `write`."""
        table = {"columns": list(COLUMNS), "data": [list(astuple(row)) for row in rows]}
        with self._trying(step):
            self._client.log_dict(self._run_id, table, f"{COMPLETIONS}/step-{step:06d}.json")

    def close(self) -> None:
        """End the run there; a second call changes nothing."""
        try:
            self._client.set_terminated(self._run_id)
        except Exception as error:  # the package has errors of many kinds
            warnings.warn(f"MLflow still shows the run as running ({error})", stacklevel=2)

    @contextmanager
    def _trying(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the package has errors of many kinds
            if not self._has_failed:
                warnings.warn(f"MLflow did not take step {step} ({error}); later steps are tried", stacklevel=4)
            self._has_failed = True

    def _begin(self, folder: Path, project: str) -> str:
        experiment = self._client.get_experiment_by_name(project)
        number = self._client.create_experiment(project) if experiment is None else experiment.experiment_id
        run_id = str(self._client.create_run(number, run_name=folder.name).info.run_id)
        write_name(folder, "mlflow", run_id)
        return run_id


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings with dotted names."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
