"""Run `treering init`: read a file and a model, and write the configuration that trains the model on the file."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from treering.cli.options import ChatTemplate, Format, JsonOutput
from treering.errors import ConfigError, InputError
from treering.extras import require

_REWARD = "exact_answer"


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
            help="With --rl: exact_answer, contains_answer, math_verify, or your own as file.py:function.",
        ),
    ] = _REWARD,
    out: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="File to write. Default: sft.toml, or train.toml with --rl.")
    ] = None,
    format: Format = "auto",
    template: ChatTemplate = "auto",
    json_output: JsonOutput = False,
) -> None:
    """Write a commented configuration for your data and model, which runs as it is.

    The whole file is read, as by `inspect`, to choose sizes. An existing file is never overwritten.

    Example: treering init runs/traces.jsonl --model Qwen/Qwen3-0.6B

    Example: treering init prompts.jsonl --model Qwen/Qwen3-0.6B --rl --reward rewards.py:brief
    """
    require("treering init")
    from treering.cli.hub import is_hub_id
    from treering.cli.init_texts import read_model, rl_text, sft_text
    from treering.cli.toml import comments

    if rl and format != "auto":
        raise ConfigError(f"--format applies to trajectories, but --rl reads prompts, got {format}; remove one of them")
    if not rl and reward != _REWARD:
        raise ConfigError(f"--reward applies to prompts, but this reads trajectories, got {reward}; add --rl")
    command = "train" if rl else "sft"
    path = out or Path(f"{command}.toml")
    _check_free(path)
    is_here = path.absolute().parent == Path.cwd()
    # Names in a configuration are looked up next to it and in the current folder, nowhere else.
    named = str(file if is_here else file.absolute())
    facts = read_model(model if is_here or is_hub_id(model, [Path()]) else str(Path(model).absolute()))
    run_dir = f"runs/{file.name.partition('.')[0]}-{command}"
    if rl:
        is_file = reward.rpartition(":")[0].endswith(".py")
        reward = str(Path(reward).absolute()) if is_file and not is_here else reward
        text = rl_text(file, named, facts, reward=reward, run_dir=run_dir, template=template)
    else:
        text = sft_text(file, named, facts, run_dir=run_dir, format=format, template=template)
    line = f"treering {command} {shlex.quote(str(path))}"
    head = comments(f"For {file} and {model}, by treering init. It runs as it is: {line}")
    with path.open("x", encoding="utf-8") as stream:
        stream.write(head + comments(f"All settings: treering {command} --help") + "#\n" + text)
    print(json.dumps({"config": str(path), "command": line}) if json_output else f"wrote {path}\nNext: {line}")


def _check_free(path: Path) -> None:
    if path.exists():
        raise InputError(f"{path} exists, and init overwrites nothing; name another file with --out, or move that one")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--out needs an existing folder, got {path}: create {path.parent} first")
