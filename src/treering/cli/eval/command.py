"""`treering eval`: measures a checkpoint or a model on held-out data, as a run does, and prints the metrics."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import nn
from transformers.utils import logging as transformers_logging

from treering.cli.corpus import load_corpus
from treering.cli.display.progress import WorkProgress, warnings_as_lines
from treering.cli.eval.target import Target, find_target
from treering.cli.hub import find_model
from treering.cli.models import choose_device, load_checkpoint
from treering.cli.settings import compute_options
from treering.cli.sft.held_out import read_files, split_corpus
from treering.cli.stdout import only_results_on_stdout
from treering.cli.train.held_out import load_held_out, measure_rewards
from treering.config import RlConfig, SftConfig
from treering.train.loop.held_out import HeldOutLoss, Measure


def run(
    *,
    name: str,
    step: int | None,
    files: Sequence[Path],
    reward: str | None,
    overrides: Sequence[str],
    json_output: bool,
) -> None:
    """Evaluates and prints.

    Args:
        name: folder of a run, or folder or hub id of a model.
        step: of the run's checkpoint; None is the newest.
        files: held-out data; none: those of the run's [eval].
        reward: reward of prompts; None for trajectories, or as the run has it.
        overrides: settings that replace those of the run.
        json_output: JSON instead of the table.

    Raises:
        ConfigError, InputError, StateError, UnsupportedError: see the parts that raise them.
    """
    # Its own progress bars would flicker through ours.
    transformers_logging.disable_progress_bar()
    with only_results_on_stdout() as results:
        target = find_target(name, step=step, files=files, reward=reward, overrides=overrides)
        console = Console(stderr=True, highlight=False)
        with warnings_as_lines(console), WorkProgress(console) as progress, ExitStack() as stack:
            measure = _measure(target, stack)
            values = dict(measure(lambda phase, done, planned: progress.show(f"{phase} {done:,} of {planned:,}")))
        if json_output:
            print(json.dumps({"weights": str(target.weights), **values}, indent=2), file=results, flush=True)
            return
        Console(file=results).print(_table(target, values))


def _measure(target: Target, stack: ExitStack) -> Measure:
    config = target.config
    model = load_checkpoint(target.weights).to(choose_device(config.model.device))
    if isinstance(config, RlConfig):
        held = load_held_out(config, Path())
        assert held is not None, "find_target checks it"
        stack.callback(held.close)
        return measure_rewards(config, held, lambda: model)
    return _loss(config, model)


def _loss(config: SftConfig, model: nn.Module) -> HeldOutLoss:
    folder = find_model(config.model, Path())
    if config.eval.files:
        held = read_files(config, config_dir=Path(), model=folder)
    else:
        corpus = load_corpus(config.data, config_dir=Path(), vocab_size=config.model.vocab_size, model=folder)
        _, part = split_corpus(config, corpus, config_dir=Path(), model=folder)
        assert part is not None, "find_target checks it"
        held = part
    compute = compute_options(config.model, config.train)
    return HeldOutLoss(model, held.tasks, compute=compute, layout=config.train.layout)


def _table(target: Target, values: dict[str, float]) -> Table:
    table = Table(title="treering eval", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("weights", str(target.weights))
    for metric, value in values.items():
        table.add_row(metric, f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
    return table
