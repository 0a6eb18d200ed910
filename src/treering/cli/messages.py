"""What a command says on stderr beside its own progress: notes about data, and settings by their names there."""

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from treering.errors import DataWarning


@contextmanager
def notes_on_stderr() -> Iterator[None]:
    """Prints each `DataWarning` of the block as one line on stderr, equal ones once; stdout stays clean."""
    said: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", DataWarning)
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, DataWarning):
                shown(message, category, *place, **more)
                return
            text = " ".join(str(message).split())
            if text not in said:
                said.add(text)
                print(f"treering: note: {text}", file=sys.stderr)

        warnings.showwarning = show
        yield


_SETTINGS: Mapping[str, str] = MappingProxyType(
    {"inspect": r"--\1 \3", "sft": r'data.\1 = "\3"', "train": r'task.\1 = "\3"'}
)
_ARGUMENT = re.compile(r'\b(template|tokenizer)=("?)(\w+)\2')


def in_words_of(command: str, message: str) -> str:
    """The message with the names that settings have in a command; unchanged for commands without them.

    Example: 'use template="plain"' is "use --template plain" for inspect, and 'use data.template = "plain"' for sft.
    """
    form = _SETTINGS.get(command)
    return message if form is None else _ARGUMENT.sub(form, message)
