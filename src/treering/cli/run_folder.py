"""What every training subcommand does around its steps: metric sinks, warnings as lines, the settings file."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date as Date

from rich.console import Console

from treering.config import Config
from treering.config.run import RunConfig
from treering.metrics import JsonlSink, Sink, TensorBoardSink
from treering.train.loop.run import METRICS_FILE, Opened, write_json

CONFIG_FILE = "config.json"
TENSORBOARD_FOLDER = "tensorboard"


@contextmanager
def printed_warnings(console: Console) -> Iterator[None]:
    """Prints the block's warnings as plain lines: those about damaged checkpoints are for the user."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        console.print(f"warning: {warning.message}", soft_wrap=True)


def open_sinks(config: RunConfig, opened: Opened) -> list[Sink]:
    """The metric sinks that `run.log` names, in the run's folder."""
    sinks: list[Sink] = []
    if "jsonl" in config.log:
        sinks.append(JsonlSink(config.dir / METRICS_FILE, resume_step=opened.resume_step))
    if "tensorboard" in config.log:
        sinks.append(TensorBoardSink(config.dir / TENSORBOARD_FOLDER, resume_step=opened.resume_step))
    return sinks


def run_date(run: RunConfig, section: str, configured: Date | None) -> Date:
    """The date that chat templates write: the configured one, else that of the run's first start, else today.

    A run's first start is read from the settings in its folder.

    Example: a run that started on 2026-01-31 and resumes the day after has 2026-01-31.
    """
    if configured is not None:
        return configured
    try:
        settings = json.loads((run.dir / CONFIG_FILE).read_text(encoding="utf-8"))
        return Date.fromisoformat(settings[section]["date"])
    except (OSError, ValueError, LookupError, TypeError):
        # A new run, or one whose settings are lost: then its identity says whether its prompts are still the same.
        return Date.today()


def write_settings(config: Config, run: RunConfig) -> None:
    """Writes all settings, with defaults and overrides, to `config.json` in the run's folder."""
    write_json(run.dir / CONFIG_FILE, config.model_dump(mode="json"))
