"""A sink for the trackers of `accelerate.tracking`. The run's JSON lines remain the authoritative record.

Torch is not imported before a tracker starts.
"""

import json
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from treering.errors import StateError
from treering.extras import require
from treering.files.writing import check_regular, write_text, writing
from treering.metrics import COLUMNS, COMPLETIONS, Completion, Number

TRACKERS_FILE: Final = "trackers.json"
"""File in the run's folder with the run's id in each tracker, which a resumed run continues."""
TENSORBOARD_FOLDER: Final = "tensorboard"

_ID_OF: Mapping[str, Callable[[Any], str]] = {
    "wandb": attrgetter("id"),
    "trackio": attrgetter("name"),
    "mlflow": attrgetter("info.run_id"),
    "comet_ml": attrgetter("id"),
    "swanlab": attrgetter("id"),
    "clearml": attrgetter("id"),
}
"""Attribute of a tracker's run that holds its id. A TensorBoard run is a folder and has no id."""


class TrackerSink:
    """A run in a tracker, with the metrics of each step under their own names.

    A resumed run continues the tracker's run. If the tracker fails during the run, one warning is given.

    Args:
        tracker: its name in accelerate, which is its package's: "tensorboard", "wandb", "trackio", "mlflow",
            "comet_ml", "swanlab" or "clearml".
        folder: folder of the run; its name is the run's name, and TensorBoard writes to its subfolder `tensorboard`.
        project: project or experiment that shows the run; TensorBoard does not use it.
        resume_step: last step that the run keeps; None means a new run.
        settings: settings of the run, which the tracker shows; TensorBoard does not use them.

    Raises:
        MissingExtraError: accelerate or the tracker's package is not installed.
        StateError: the tracker cannot start, for example without a login.

    Example: `TrackerSink("tensorboard", Path("runs/a"), project="sums", resume_step=6)` after a run of 9 steps shows
    steps 1 to 6, and continues with step 7.
    """

    def __init__(
        self,
        tracker: str,
        folder: Path,
        *,
        project: str,
        resume_step: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        require(f'metrics.sinks = ["{tracker}"]', "accelerate", tracker)
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        self._name, self._has_failed, self._is_open = tracker, False, True
        ids = {} if resume_step is None else _read_ids(folder)
        name = TENSORBOARD_FOLDER if tracker == "tensorboard" else project
        try:
            _start_state()
            folder.mkdir(parents=True, exist_ok=True)
            options = _options(tracker, folder, ids.get(tracker), resume_step, dict(settings or {}))
            self._tracker: Any = LOGGER_TYPE_TO_CLASS[tracker](name, **options)
            # Only the first rank opens sinks, so accelerate does not have to find the rank.
            self._tracker.main_process_only = False
            self._tracker.start()
            if tracker in ("mlflow", "comet_ml", "clearml") and tracker not in ids:
                self._tracker.store_init_configuration(dict(_flat(settings or {})))
        except Exception as error:  # each package has its own errors
            raise StateError(
                f"{tracker} cannot start the run of {folder} ({error}); check its login, server and disk, or remove "
                f'"{tracker}" from metrics.sinks'
            ) from error
        if tracker in _ID_OF and tracker not in ids:
            _write_id(folder, tracker, _ID_OF[tracker](self._tracker.tracker))

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        """Log the values of one step; most trackers send them later."""
        # Without `commit`, Weights & Biases holds a step back until the next one.
        commit = {"commit": True} if self._name == "wandb" else {}
        self._try(f"did not take step {step}", lambda: self._tracker.log(dict(values), step=step, **commit))

    def write_completions(self, step: int, rows: Sequence[Completion]) -> None:
        """Log a table, in TensorBoard as Markdown; trackers whose accelerate class has no tables get nothing."""
        if hasattr(self._tracker, "log_table"):
            table = {"columns": list(COLUMNS), "data": [list(astuple(row)) for row in rows]}
            self._try("did not take a table", lambda: self._tracker.log_table(COMPLETIONS, **table, step=step))
        elif self._name == "tensorboard":
            text = {COMPLETIONS: _as_markdown(rows)}
            self._try("did not take a table", lambda: self._tracker.log(text, step=step))

    def close(self) -> None:
        """Finish the tracker's run; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._try("may still show the run as running", self._tracker.finish)

    def _try(self, failure: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # each package has its own errors
            if not self._has_failed:
                warnings.warn(f"{self._name} {failure} ({error}); the run goes on", stacklevel=4)
            self._has_failed = True


def _options(tracker: str, folder: Path, known: str | None, resume_step: int | None, settings: Any) -> dict[str, Any]:
    """Return the arguments with which the tracker starts a run, or continues the one with the id `known`."""
    run = {"name": folder.name, "config": settings} | ({"id": known, "resume": "allow"} if known else {})
    if tracker == "tensorboard":
        return {"logging_dir": folder, "purge_step": None if resume_step is None else resume_step + 1}
    if tracker == "wandb":
        return {**run, "dir": str(folder), "settings": {"silent": True}}
    if tracker == "trackio":
        name = known or f"{folder.name}-{secrets.token_hex(4)}"
        # The load of the machine is not a metric of the run.
        quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        return {"name": name, "resume": "allow", "config": settings, **quiet}
    if tracker == "mlflow":
        return {"run_name": folder.name, "run_id": known}
    if tracker == "comet_ml":
        return {"experiment_key": known}
    if tracker == "clearml":
        # With another offset than 0, ClearML adds the run's last step to later steps.
        return {"task_name": folder.name, "reuse_last_task_id": known or False, "continue_last_task": 0}
    return {**run, "log_dir": str(folder / "swanlog")}


def _start_state() -> None:
    """Create the state that accelerate's loggers need, without LOCAL_RANK, which would start a process group."""
    from accelerate import PartialState

    local_rank = os.environ.pop("LOCAL_RANK", None)
    try:
        PartialState()
    finally:
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank


def _read_ids(folder: Path) -> dict[str, str]:
    file = folder / TRACKERS_FILE
    try:
        check_regular(file)
        return {str(tracker): str(name) for tracker, name in json.loads(file.read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise StateError(
            f"{file} holds the run's ids in its trackers, and it cannot be read ({error}); remove it, and the trackers "
            "start a new run"
        ) from error


def _write_id(folder: Path, tracker: str, run_id: str) -> None:
    with writing(folder / TRACKERS_FILE):
        write_text(folder / TRACKERS_FILE, json.dumps(_read_ids(folder) | {tracker: run_id}, indent=1) + "\n")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings with dotted names, such as "rl.group_size"."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _as_markdown(rows: Sequence[Completion]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(astuple(row) for row in rows)]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("|", r"\|").replace("\n", " ⏎ ")
