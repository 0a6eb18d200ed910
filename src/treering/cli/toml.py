"""Write TOML: keys with values and comments, and sections."""

import json
import re
from collections.abc import Mapping, Sequence
from textwrap import wrap

_WIDTH = 100
_BARE = re.compile(r"[\w-]+", re.ASCII)
"""Keys that need no quotes."""


def pair(key: str, value: object, comment: str = "") -> str:
    """Return a key with its value, under a comment.

    Example: `pair("seed", 3, "any number")` is the two lines "# any number" and "seed = 3".
    """
    return comments(comment) + f"{key} = {as_toml(value)}\n"


def as_toml(value: object) -> str:
    """Return a value; a table is inline, without its keys that are None.

    Example: `as_toml({"temperature": 0.5, "stop": None})` is "{ temperature = 0.5 }".
    """
    if isinstance(value, Mapping) and value:
        pairs = [(key if _BARE.fullmatch(key) else as_toml(key), one) for key, one in value.items() if one is not None]
        return f"{{ {', '.join(f'{key} = {as_toml(one)}' for key, one in pairs)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    # TOML and JSON write strings, numbers and booleans alike, except that TOML must escape DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


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
