"""Options of `treering serve` and their help; `treering.cli.serve.run_serve` does the work."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from treering.cli.options import RunOrModel, Step, one_of

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Model to serve, where, and with how much room."""

    name: RunOrModel
    host: Annotated[
        str, typer.Option(metavar="IP", help="Address to listen on; beyond loopback TREERING_API_KEY must be set.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8000
    served_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model for clients. Default: RUN_OR_MODEL.")
    ] = None
    history: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of a history to draft from.")] = None
    max_batch: Annotated[int, typer.Option(min=1, help="Calls sampled at a time.")] = 64
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens whose keys and values fit.")] = 65536
    device: Annotated[
        str, typer.Option(parser=one_of(*DEVICES), metavar="|".join(DEVICES), help="auto: cuda if there is one.")
    ] = "auto"
    dtype: Annotated[
        str, typer.Option(parser=one_of(*DTYPES), metavar="|".join(DTYPES), help="Type of the weights.")
    ] = "float32"
    step: Step = None
    train: Annotated[bool, typer.Option("--train", help="Let clients of Tinker's protocol train.")] = False
    checkpoints: Annotated[Path, typer.Option(metavar="DIR", help="With --train: folder of their checkpoints.")] = Path(
        "runs/tinker"
    )
    sharing: Annotated[
        str,
        typer.Option(
            parser=one_of("on", "off"), metavar="on|off", help="With --train: off trains each datum separately."
        ),
    ] = "on"
    drafts: Annotated[
        str,
        typer.Option(
            parser=one_of("on", "off"), metavar="on|off", help="With --train: off drafts nothing for clients."
        ),
    ] = "on"
