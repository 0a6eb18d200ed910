"""Write TOML: keys with values and comments, and sections."""

import json
from collections.abc import Sequence
from textwrap import wrap

_WIDTH = 100


def pair(key: str, value: object, comment: str = "") -> str:
    """Return a key with its value, under a comment.

    Example: `pair("seed", 3, "any number")` is the two lines "# any number" and "seed = 3".
    """
    # TOML and JSON write strings, numbers, booleans and arrays alike, except that TOML must escape DEL.
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return comments(comment) + f"{key} = {text}\n"


def comments(text: str) -> str:
    """Return a comment of as many lines as the text needs; empty for no text."""
    # Line breaks of any kind become spaces, so that no text can end its comment.
    words = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return "".join(f"# {line}\n" for line in wrap(words, _WIDTH, break_long_words=False, break_on_hyphens=False))


def section(name: str, lines: Sequence[str]) -> str:
    r"""Return a section after an empty line.

    Example: `section("run", ["dir = 1\n"])` is an empty line, "[run]" and "dir = 1".
    """
    return f"\n[{name}]\n{''.join(lines)}"
