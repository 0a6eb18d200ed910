"""The options of `treering eval` and their help; `treering.cli.eval.command` does the work."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from treering.cli.options import JsonOutput, Overrides, RunOrModel, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """What is evaluated, and on what."""

    name: RunOrModel
    overrides: Overrides = None
    file: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Held-out trajectories, or prompts; without it those of the run's [eval]."),
    ] = None
    reward: Annotated[
        str | None, typer.Option(metavar="NAME", help="The file holds prompts: their reward, see task.reward.")
    ] = None
    step: Step = None
    json_output: JsonOutput = False
