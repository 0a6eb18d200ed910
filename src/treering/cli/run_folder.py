"""What every training subcommand does around its steps: sinks of metrics, warnings as lines, settings as a file.

Knows names inside a run folder. Knows nothing of data, models and losses.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from treering.config import Config
from treering.config.run import RunConfig
from treering.metrics import JsonlSink, Sink, TensorBoardSink
from treering.train.loop.run import METRICS_FILE, Opened, write_json

CONFIG_FILE = "config.json"
TENSORBOARD_FOLDER = "tensorboard"


@contextmanager
def told_on(console: Console) -> Iterator[None]:
    """Warnings of the block as plain lines; those of damaged checkpoints are for the user, not for a log of code."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        console.print(f"warning: {warning.message}", soft_wrap=True)


def open_sinks(config: RunConfig, opened: Opened) -> list[Sink]:
    """The sinks that `run.log` names, in the run's folder."""
    sinks: list[Sink] = []
    if "jsonl" in config.log:
        sinks.append(JsonlSink(config.dir / METRICS_FILE, resume_step=opened.resume_step))
    if "tensorboard" in config.log:
        sinks.append(TensorBoardSink(config.dir / TENSORBOARD_FOLDER, resume_step=opened.resume_step))
    return sinks


def write_settings(config: Config, run: RunConfig) -> None:
    """Puts every setting of a start, defaults and overrides included, into `config.json` of the run's folder."""
    write_json(run.dir / CONFIG_FILE, config.model_dump(mode="json"))
