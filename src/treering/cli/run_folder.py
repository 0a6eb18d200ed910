"""Manage a training run's folder: lock, sinks, warnings and settings."""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from treering.config import Config
from treering.config.run import MetricsConfig, RunConfig
from treering.errors import StateError
from treering.files.lock import FileLock
from treering.files.writing import CHECKPOINTS_FOLDER, check_regular, writing
from treering.metrics import METRICS_FILE, JsonlSink, Sink
from treering.report.rollout_views import ROLLOUTS_FOLDER, SAMPLES_FILE
from treering.report.run_data import CONFIG_FILE, LOCK_FILE, STARTS_FILE, TIMELINE_FILE
from treering.trackers import TENSORBOARD_FOLDER, TRACKERS_FILE, TrackerSink
from treering.train.loop.saved_run import RUN_FILE, Opened, write_json

HISTORY_FOLDER = "history"
SHARED_HISTORY_FOLDER = "history-shared"
"""History that rollout workers read."""
WARMUP_FOLDER = "warmup"
_FILES = (
    RUN_FILE,
    CONFIG_FILE,
    METRICS_FILE,
    LOCK_FILE,
    TRACKERS_FILE,
    TIMELINE_FILE,
    STARTS_FILE,
    SAMPLES_FILE,
)
_FOLDERS = (
    *(CHECKPOINTS_FOLDER, HISTORY_FOLDER, SHARED_HISTORY_FOLDER, ROLLOUTS_FOLDER, TENSORBOARD_FOLDER, WARMUP_FOLDER),
)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create a run's folder and hold its lock; `run.lock` in it names the process.

    A folder that was created here and is otherwise empty at the end, as after a refused run, is removed.

    Raises:
        StateError: another process holds it, it is not writable, or something else has the name of one of its files or
            folders.

    Example: `with locked(Path("runs/a")): ...` refuses a second process that trains in `runs/a`.
    """
    is_new = not folder.exists()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for each in (folder, folder / WARMUP_FOLDER):
        _check_names(each)
    with writing(folder / LOCK_FILE):
        lock = FileLock(
            folder / LOCK_FILE,
            lambda holder: (
                f"{holder} already trains in {folder}, and a run folder takes one process at a time; wait for it, end "
                "it, or choose another run folder"
            ),
        )
    try:
        with writing(folder):
            _clear_drafts(folder)
        yield
    finally:
        if is_new and os.listdir(folder) == [LOCK_FILE]:
            # Remove it while the lock is held, so that no other process can have begun in it.
            (folder / LOCK_FILE).unlink()
            folder.rmdir()
        lock.release()


def _clear_drafts(folder: Path) -> None:
    for name in (*_FILES, f"{ROLLOUTS_FOLDER}/epoch-*"):
        path = folder / name
        for draft in path.parent.glob(f".{path.name}.*"):
            draft.unlink()


def _check_names(folder: Path) -> None:
    for name in _FILES:
        with writing(folder / name):
            check_regular(folder / name)
    for name in _FOLDERS:
        # A dangling link also occupies the name.
        path = folder / name
        if not path.is_dir() and (path.exists() or path.is_symlink()):
            raise StateError(f"{path} must be a folder, but something else has that name; move it away")


@contextmanager
def warnings_on_console(console: Console) -> Iterator[None]:
    """Print the block's warnings, such as those about damaged checkpoints and logs, as plain lines."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        console.print(f"warning: {warning.message}")


def open_sinks(config: MetricsConfig, folder: Path, opened: Opened, settings: Mapping[str, Any]) -> list[Sink]:
    """Open the sinks that `metrics.sinks` names for the run in `folder`, all or none; trackers show its `settings`."""
    with ExitStack() as stack:
        sinks: list[Sink] = []
        for name in config.sinks:
            sinks.append(
                JsonlSink(folder / METRICS_FILE, resume_step=opened.resume_step)
                if name == "jsonl"
                else TrackerSink(
                    name, folder, project=config.project, resume_step=opened.resume_step, settings=settings
                )
            )
            stack.callback(sinks[-1].close)
        stack.pop_all()
    return sinks


def write_settings(config: Config, run: RunConfig, num_steps: int) -> None:
    """Write all settings, with defaults and overrides, to `config.json` in the run's folder.

    It also has the resulting `num_steps`, next to the sections.
    """
    write_json(run.dir / CONFIG_FILE, {**config.model_dump(mode="json"), "num_steps": num_steps})
