"""`treering sft` and `treering train`: read the configuration, train, print the summary.

The configuration is read before torch is imported, so mistakes in it are reported at once.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from treering.cli.display import PlainConsole, warnings_as_lines
from treering.cli.ranks import is_first, num_started
from treering.cli.signals import advising
from treering.cli.user_messages import only_results_on_stdout
from treering.config import RlConfig, SftConfig, load
from treering.config.record import read_toml
from treering.config.run import RunConfig
from treering.errors import ConfigError
from treering.report.run_data import CONFIG_FILE

ConfigT = TypeVar("ConfigT", SftConfig, RlConfig)


def run_sft(config_path: Path, overrides: list[str], json_output: bool) -> None:
    """Fine-tune by the configuration; the summary goes to stdout, everything else to stderr.

    Raises:
        ConfigError, InputError, StateError, UnsupportedError: bad settings, data or run folder.
    """
    config = _load(SftConfig, config_path, overrides)

    def start(console: Console) -> tuple[dict[str, Any], Table]:
        from treering.cli.sft_command import train

        return train(config, config_dir=config_path.parent, console=console)

    _run(config.run, json_output, start)


def run_train(config_path: Path, overrides: list[str], json_output: bool) -> None:
    """Train by reinforcement learning by the configuration; output and errors as in `run_sft`."""
    config = _load(RlConfig, config_path, overrides)
    _check_ranks(config)

    def start(console: Console) -> tuple[dict[str, Any], Table]:
        from treering.cli.train import train

        return train(config, config_dir=config_path.parent, console=console)

    _run(config.run, json_output, start)


def _run(run: RunConfig, json_output: bool, start: Callable[[Console], tuple[dict[str, Any], Table]]) -> None:
    """Train, and print the summary as JSON or as a table."""

    def how_to_go_on() -> str:
        has_started = (run.dir / CONFIG_FILE).exists()
        return f"the same command {'resumes' if has_started else 'begins'} the run in {run.dir}"

    with advising(how_to_go_on), only_results_on_stdout() as results:
        console = PlainConsole(stderr=True, quiet=not is_first())
        console.print("importing torch and transformers")
        with warnings_as_lines(console):
            summary, table = start(console)
        if json_output and is_first():
            print(json.dumps(summary, indent=2), file=results, flush=True)
        elif is_first():
            PlainConsole(file=results).print(table)


def _load(config_type: type[ConfigT], path: Path, overrides: list[str]) -> ConfigT:
    """Read the configuration; report a file of the other command as a whole, not key by key."""
    command, other = ("train", RlConfig) if config_type is SftConfig else ("sft", SftConfig)
    own, theirs = config_type.model_fields.keys(), other.model_fields.keys()
    sections = read_toml(path).keys()
    foreign = [name for name in sections if name in theirs - own]
    if foreign and not sections & (own - theirs):
        raise ConfigError(
            f"{path} is a file of `treering {command}`, because it has the sections {', '.join(foreign)}; run treering "
            f"{command} {path}"
        )
    return load(config_type, path, overrides)


def _check_ranks(config: RlConfig) -> None:
    if num_started() == 1:
        return
    own = {
        f"runtime.workers = {config.runtime.workers} starts": (config.runtime.workers > 0, "runtime.workers=0"),
        'engine.kind = "vllm" starts': (config.engine.kind == "vllm", 'engine.kind="torch"'),
    }
    for what, (is_set, instead) in own.items():
        if is_set:
            raise ConfigError(
                f"under torchrun each rank samples for itself, but {what} its own processes: set {instead}, or "
                f"start without torchrun, which started {num_started()} processes"
            )
