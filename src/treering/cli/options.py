"""Command-line options that several subcommands share."""

from collections.abc import Callable
from typing import Annotated, get_args

import typer

from treering.data import FormatName

FORMAT_HELP = (
    f"Format of the records: {', '.join(get_args(FormatName))}. Default: auto, found from the keys of the first record."
)


def _format(word: str) -> str:
    return one_of(*get_args(FormatName))(word)


Format = Annotated[FormatName, typer.Option("--format", parser=_format, metavar="NAME", help=FORMAT_HELP)]

JsonOutput = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of tables.")]

NoCache = Annotated[
    bool,
    typer.Option("--no-cache", help="Keep no cache of the tokens, and read none; see `treering cache`."),
]


def one_of(*words: str) -> Callable[[str], str]:
    """A parser for `typer.Option(parser=...)` that accepts only these words.

    It works in every typer since 0.12; typer reads `Literal` only since 0.19.

    Example: `one_of("plain", "hf")("hff")` raises BadParameter: 'hff' is not one of 'plain', 'hf'.
    """

    def parse(word: str) -> str:
        if word not in words:
            raise typer.BadParameter(f"{word!r} is not one of {', '.join(map(repr, words))}.")
        return word

    return parse
