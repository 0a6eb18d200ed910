"""Writes TOML: keys with their values and comments, and sections."""

import json
from collections.abc import Sequence
from textwrap import wrap

_WIDTH = 100


def pair(key: str, value: object, comment: str = "") -> str:
    """A key with its value, under a comment.

    Example: `pair("seed", 3, "any number")` is the two lines "# any number" and "seed = 3".
    """
    # Of strings, numbers, booleans and arrays TOML and JSON have the same form; DEL alone must be escaped too.
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return comments(comment) + f"{key} = {text}\n"


def comments(text: str) -> str:
    """A comment of as many lines as it takes; empty for no text."""
    # Line breaks of any kind become spaces, so that no text of a file ends its comment.
    words = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return "".join(f"# {line}\n" for line in wrap(words, _WIDTH, break_long_words=False, break_on_hyphens=False))


def section(name: str, lines: Sequence[str]) -> str:
    r"""A section after an empty line.

    Example: `section("run", ["dir = 1\n"])` is an empty line, "[run]" and "dir = 1".
    """
    return f"\n[{name}]\n{''.join(lines)}"
