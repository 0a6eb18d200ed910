"""The options of `treering serve` and their help; `treering.cli.serve.command` does the work."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from treering.cli.options import RunOrModel, Step, one_of

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What is served, where, and with how much room."""

    name: RunOrModel
    host: Annotated[str, typer.Option(metavar="IP", help="Beyond loopback it needs TREERING_API_KEY.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is a free one.")] = 8000
    served_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What clients call the model; else RUN_OR_MODEL.")
    ] = None
    history: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of a history, whose rollouts are drafted from.")
    ] = None
    max_batch: Annotated[int, typer.Option(min=1, help="Calls that are sampled at one time.")] = 64
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens whose keys and values fit.")] = 65536
    device: Annotated[
        str, typer.Option(parser=one_of(*DEVICES), metavar="|".join(DEVICES), help="auto: cuda if there is one.")
    ] = "auto"
    dtype: Annotated[
        str, typer.Option(parser=one_of(*DTYPES), metavar="|".join(DTYPES), help="Type of the weights.")
    ] = "float32"
    step: Step = None
    train: Annotated[bool, typer.Option("--train", help="Clients of Tinker's protocol may train, too.")] = False
    checkpoints: Annotated[Path, typer.Option(metavar="DIR", help="With --train, where their checkpoints are.")] = Path(
        "runs/tinker"
    )
    sharing: Annotated[
        str,
        typer.Option(parser=one_of("on", "off"), metavar="on|off", help="With --train, off trains every datum alone."),
    ] = "on"
    drafts: Annotated[
        str,
        typer.Option(
            parser=one_of("on", "off"), metavar="on|off", help="With --train, off drafts nothing for clients."
        ),
    ] = "on"
