"""The arguments of `treering init` and their help; `treering.cli.init.run` does the work."""

from pathlib import Path
from typing import Annotated

import typer

from treering.cli.options import Format, JsonOutput
from treering.extras import require


def init(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Trajectories to train on; with --rl, prompts with their answers.")
    ],
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help="Hugging Face model: a folder, or its id on the hub.", show_default=False),
    ],
    rl: Annotated[bool, typer.Option("--rl", help="Write a configuration of `train` instead of `sft`.")] = False,
    reward: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="With --rl: exact_answer, contains_answer, math_verify, or package.module:function of your own.",
        ),
    ] = "exact_answer",
    out: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="The file to write: sft.toml, or train.toml with --rl.")
    ] = None,
    format: Format = "auto",
    json_output: JsonOutput = False,
) -> None:
    """Write a commented configuration for your data and model, which runs as it is.

    It reads the whole file, as `inspect` does, and chooses sizes by it. A file that exists is never overwritten.

    Example: treering init runs/traces.jsonl --model Qwen/Qwen3-0.6B

    Example: treering init prompts.jsonl --model Qwen/Qwen3-0.6B --rl --reward my_rewards:brevity
    """
    require("treering init")
    from treering.cli.init.run import run

    run(file=file, model=model, rl=rl, reward=reward, out=out, format=format, json_output=json_output)
