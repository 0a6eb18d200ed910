"""An option that takes one of a few words, in every typer since 0.12; typer reads `Literal` only since 0.19."""

from collections.abc import Callable

import typer


def one_of(*words: str) -> Callable[[str], str]:
    """A parser for `typer.Option(parser=...)` that returns one of the words and refuses anything else.

    Example: `one_of("plain", "hf")("hff")` raises BadParameter: 'hff' is not one of 'plain', 'hf'.
    """

    def parse(word: str) -> str:
        if word not in words:
            raise typer.BadParameter(f"{word!r} is not one of {', '.join(map(repr, words))}.")
        return word

    return parse
