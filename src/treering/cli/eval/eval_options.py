"""Options of `treering eval` and their help; `treering.cli.eval.run_eval` does the work."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from treering.cli.options import JsonOutput, Overrides, RunOrModel, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalArguments:
    """What to evaluate, and on which data."""

    name: RunOrModel
    overrides: Overrides = None
    file: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Held-out trajectories or prompts. Default: those of the run's [eval]."),
    ] = None
    reward: Annotated[
        str | None, typer.Option(metavar="NAME", help="Read prompts from the file, with this reward (see task.reward).")
    ] = None
    step: Step = None
    json_output: JsonOutput = False
