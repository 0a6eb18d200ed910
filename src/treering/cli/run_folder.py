"""What every training subcommand does around its steps: folder and lock of the run, sinks, warnings, settings."""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from treering.config import Config
from treering.config.metrics import MetricsConfig
from treering.config.run import RunConfig
from treering.errors import StateError
from treering.files.lock import FileLock
from treering.files.writing import check_regular, writing
from treering.metrics import JsonlSink, Sink
from treering.report.rollouts import ROLLOUTS_FOLDER, SAMPLES_FILE
from treering.report.run import CONFIG_FILE, LOCK_FILE, STARTS_FILE, TIMELINE_FILE
from treering.trackers import TENSORBOARD_FOLDER, TRACKERS_FILE, TrackerSink
from treering.train.loop.saved_run import CHECKPOINTS_FOLDER, METRICS_FILE, RUN_FILE, Opened, write_json

HISTORY_FOLDER = "history"
SHARED_HISTORY_FOLDER = "history-shared"
"""The history that rollout workers read."""
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
    """Holds a run's folder for this process, and creates it; `run.lock` in it names the process.

    A folder that was made here and holds nothing else at the end, as of a run that was refused, is removed.

    Raises:
        StateError: another process holds it, it cannot be written, or something else has the name of one of its files
            or folders.

    Example: `with locked(Path("runs/a")): ...` refuses a second process that trains in `runs/a`.
    """
    is_new = not folder.exists()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for place in (folder, folder / WARMUP_FOLDER):
        _check_names(place)
    with writing(folder / LOCK_FILE):
        lock = FileLock(
            folder / LOCK_FILE,
            lambda holder: (
                f"one process at a time trains in a run folder, and {holder} trains in {folder}; wait for it or end "
                "it, or choose another run folder"
            ),
        )
    try:
        with writing(folder):
            _clear_drafts(folder)
        yield
    finally:
        if is_new and os.listdir(folder) == [LOCK_FILE]:
            # Removed while the lock is held, so that no other process has begun in it.
            (folder / LOCK_FILE).unlink()
            folder.rmdir()
        lock.release()


def _clear_drafts(folder: Path) -> None:
    """Removes what a killed process left of files that it was writing."""
    for name in (*_FILES, f"{ROLLOUTS_FOLDER}/epoch-*"):
        place = folder / name
        for draft in place.parent.glob(f".{place.name}.*"):
            draft.unlink()


def _check_names(folder: Path) -> None:
    for name in _FILES:
        with writing(folder / name):
            check_regular(folder / name)
    for name in _FOLDERS:
        # A link to nothing is in the way too.
        path = folder / name
        if not path.is_dir() and (path.exists() or path.is_symlink()):
            raise StateError(f"{path} belongs to a folder, and something else has that name; move it away, start again")


@contextmanager
def printed_warnings(console: Console) -> Iterator[None]:
    """Prints the block's warnings as plain lines: those about damaged checkpoints and logs are for the user."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        console.print(f"warning: {warning.message}", soft_wrap=True)


def open_sinks(config: MetricsConfig, folder: Path, opened: Opened, settings: Mapping[str, Any]) -> list[Sink]:
    """The sinks that `metrics.sinks` names, of the run in `folder`; all or none. Trackers show its `settings`."""
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
    """Writes all settings, with defaults and overrides, to `config.json` in the run's folder.

    Beside the sections stands `num_steps`, to which they amount.
    """
    write_json(run.dir / CONFIG_FILE, {**config.model_dump(mode="json"), "num_steps": num_steps})
