"""Options that several subcommands share, commands whose options are a record, and those of `eval` and `serve`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer

from treering.data import FormatName, Template

OptionsT = TypeVar("OptionsT")

FORMAT_HELP = (
    f"Format of the records: {', '.join(get_args(FormatName))}. Default: auto, found from the keys of the first record."
)


def one_of(*words: str) -> Callable[[str], str]:
    """Return a parser for `typer.Option(parser=...)` that accepts only these words.

    It works in every typer since 0.12; typer reads `Literal` only since 0.19.

    Example: `one_of("plain", "hf")("hff")` raises BadParameter: 'hff' is not one of 'plain', 'hf'.
    """

    def parse(word: str) -> str:
        if word not in words:
            raise typer.BadParameter(f"{word!r} is not one of {', '.join(map(repr, words))}.")
        return word

    return parse


Format = Annotated[
    FormatName, typer.Option("--format", parser=one_of(*get_args(FormatName)), metavar="NAME", help=FORMAT_HELP)
]

ChatTemplate = Annotated[
    Template,
    typer.Option(
        "--template",
        parser=one_of("auto", "plain", "hf"),
        metavar="auto|plain|hf",
        help="How messages become text: by the tokenizer's chat template (hf), or the plain form. Default: auto, which "
        "is hf if there is a template.",
    ),
]

JsonOutput = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of tables.")]

NoCache = Annotated[
    bool,
    typer.Option("--no-cache", help="Neither read nor write the cache of tokens; see `treering cache`."),
]

Step = Annotated[int | None, typer.Option(metavar="N", help="Step of the checkpoint. Default: the newest.")]

RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN_OR_MODEL", help="Folder of a run, or folder or hub id of a model.")
]

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file with the sections below.")]

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE...]", help="Settings that replace those of the file or run.")
]


def takes(record: type[OptionsT]) -> Callable[[Callable[[OptionsT], None]], Callable[..., None]]:
    """Return a decorator that makes a typer command whose options are the fields of a record.

    Example: `@app.command()` over `@takes(InspectOptions)` over `def inspect(options): ...`.
    """

    def decorate(run: Callable[[OptionsT], None]) -> Callable[..., None]:
        @wraps(run)
        def command(**given: Any) -> None:
            run(record(**given))

        # Typer reads the signature.
        command.__dict__["__signature__"] = signature(record)
        return command

    return decorate


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
