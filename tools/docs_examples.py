"""An extension of griffe for mkdocs.yml: examples of docstrings are shown as code, without their doctest flags."""

import re
from typing import Any

import griffe

# Griffe knows the title `Examples:` alone; behind any other it reads a box of prose. Words may stand before the code.
_TITLE = re.compile(r"^( *)Example:(?: (.+))?\n(?=\1    >>>)", re.MULTILINE)


class Examples(griffe.Extension):
    """Reads an `Example:` with code as the section of examples."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Renames the title in the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = _TITLE.sub(_as_section, obj.docstring.value)


def _as_section(found: re.Match[str]) -> str:
    indent, words = found.groups()
    return f"{indent}Examples:\n" + (f"{indent}    {words}\n\n" if words else "")
